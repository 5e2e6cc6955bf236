"""SFT of published model shapes beside TRL and the HF Trainer: python benchmarks/transformers_models.py --path FILE
[--models NAME+NAME] [--rounds N] [--write].

Folders with random weights in the published shapes, and the tokenizer of the samples: its 6,400 tokens are the first
rows of the larger embedding. Every trainer starts from such a folder, as its users do: `init_from=FOLDER`, or
`AutoModelForCausalLM.from_pretrained`. Same rows, tokens per micro-batch and precision (bf16); one process each, taking
turns step by step. A micro-batch of TRL has 4 padded rows: it accumulates as many as have the useful tokens of a packed
step. Ratios are medians of the ratios of each round: of useful tokens per second, and of the peak memory of the
process.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from lib.interleave import CaseProcess, case_spec, measure, ratio, tokens_per_second
from lib.results import machine_line, report_result, result_parser, write_numbers
from lib.runs import SAMPLES, compose_run
from lib.trainers import why_left_out
from speed import write_rows

ROWS, LENGTH = 4, 512  # rows per micro-batch, tokens per row
OURS, TRAINER, TRL = "ours, packed, compiled", "HF Trainer, packed, compiled", "TRL SFTTrainer, padded"
LLAMA = {"hidden_act": "silu", "attention_dropout": 0.0, "tie_word_embeddings": True}
QWEN = LLAMA | {
    **{
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 4,
        "num_attention_heads": 14,
    },
    **{
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
}
SMOLLM = LLAMA | {
    **{
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    },
    **{"num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192},
}
PYTHIA = {
    **{
        "model_type": "gpt_neox",
        "vocab_size": 50_304,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    **{
        "rotary_pct": 0.25,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
FORCED = ["model.family=transformers"]
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {  # name -> (config.json, overrides of our runs)
    "Qwen2.5-0.5B, 4 layers": (QWEN, []),
    "SmolLM2-135M": (SMOLLM, []),
    "SmolLM2-135M, model.family=transformers": (SMOLLM, FORCED),
    "Pythia-160M": (PYTHIA, []),
}
GOALS = {TRL: 2.5, TRAINER: 1.15}  # useful tokens per second of this program relative to the other trainer
# the first beside the HF Trainer where the model is computed by its class of transformers
TRANSFORMERS_GOAL, MEMORY_GOAL = 1.0, 0.85
HEAD = (
    "| model | case | useful tokens/s | padding | peak memory, MB | first step, s | ours / this, useful tokens/s (goal) | by processor time | ours / this, memory (goal) |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a folder with random weights and a tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {name: value for name, value in config.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **settings)).save_pretrained(folder)
    for file in (SAMPLES / "tokenizer").iterdir():
        shutil.copy(file, folder)
    return str(folder)


def model_specs(
    args: argparse.Namespace, name: str, folder: str, model: str
) -> tuple[list[tuple[str, dict]], list[str]]:
    """Return (name, spec) of the cases of one model that can run here, and a message per case that cannot.

    `model`: its folder.
    """
    config, overrides = MODELS[name]
    overrides = [f"init_from={model}", *overrides, *args.overrides]
    spec = case_spec(overrides, stage="sft", path=args.path, tokenizer=model, rows=ROWS, length=LENGTH, folder=folder)
    heads = {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    spec |= {
        "model": config | heads,
        "model_folder": model,
        "tokenizer": model,
        "precision": "bf16",
        "files": write_rows(args, folder),
    }
    accumulation = {
        TRL: {name: max(1, round(LENGTH / mean_row_tokens(spec))) for name in ("accumulation", "steps_per_turn")}
    }
    chosen, messages = list[tuple[str, dict]](), list[str]()
    # TRL is measured beside the same shape without it
    default = (OURS, TRAINER) if FORCED[0] in overrides else (OURS, TRAINER, TRL)
    for case in args.cases.split("+") if args.cases else default:
        if reason := why_left_out(case, vars(args)):
            messages.append(f"left out: {case}: {reason}")
            continue
        chosen.append((case, spec | {"case": case} | accumulation.get(case, {})))
    return chosen, messages


def mean_row_tokens(spec: dict) -> float:
    from data.tokenize.tokenizer import Tokenizer
    from runner.engine.data_pipeline import build_data_pipeline

    rows = build_data_pipeline(
        compose_run([*spec["overrides"], "data.packing=none"]), Tokenizer.load(Path(spec["tokenizer"]))
    ).train
    return sum(len(row.sequences[0].ids) for index in range(len(rows)) for row in rows[index]) / len(rows)


def results(model: str, cases: list[CaseProcess]) -> list[dict[str, Any]]:
    """Return the numbers of each case of a model, relative to the first."""
    first, lines = cases[0], []
    memory = {case.name: max(step["memory"] for step in case.steps) for case in cases}
    for case in cases:
        fill = first.fill_ratio / case.fill_ratio
        lines.append({
            "model": model,
            "case": case.name,
            "useful_tokens_per_second": case.median(tokens_per_second) * case.fill_ratio,
            "useful_share": case.fill_ratio,
            "peak_memory_mb": memory[case.name],
            "first_step_seconds": case.first_step_seconds,
            "relative_speed": ratio(tokens_per_second, first, case) * fill,
            "relative_speed_cpu": ratio(tokens_per_second, first, case, "cpu") * fill,
            "relative_memory": memory[first.name] / memory[case.name],
        })  # fmt: skip
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        is_own = line["model"] in ("Qwen2.5-0.5B, 4 layers", "SmolLM2-135M")
        goal = GOALS.get(line["case"]) if is_own or line["case"] != TRAINER else TRANSFORMERS_GOAL
        ratios = ("", "", "")
        if goal:
            ratios = (
                f"{line['relative_speed']:.2f} ({goal})",
                f"{line['relative_speed_cpu']:.2f}",
                f"{line['relative_memory']:.2f} ({MEMORY_GOAL})",
            )
        rows.append(
            f"| {line['model']} | {line['case']} | {line['useful_tokens_per_second']:,.0f} | {1 - line['useful_share']:.1%} | "
            f"{line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | {' | '.join(ratios)} |"
        )
    return "\n".join([HEAD, *rows])


def choose_models(names: str | None) -> list[str]:
    chosen = [model for model in MODELS if names is None or any(part in model for part in names.split("+"))]
    if not chosen:
        raise SystemExit(f"--models must be parts of: {'; '.join(MODELS)}; got {names}")
    return chosen


def main(args: argparse.Namespace) -> None:
    lines, messages = list[dict[str, Any]](), list[str]()
    for name in choose_models(args.models):
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder) / "model", MODELS[name][0])
            chosen, left_out = model_specs(args, name, folder, model)
            cases, failed = measure(chosen, args.rounds)
        messages += [*left_out, *(f"{name}: {message}" for message in failed)]
        if cases and cases[0].name.startswith("ours"):
            lines += results(name, cases)
            print(table(lines), flush=True)
    flags = {"path": Path(args.path).name, "rounds": args.rounds} | (
        {"models": f'"{args.models}"'} if args.models else {}
    )
    command = " ".join(
        [
            "python benchmarks/transformers_models.py",
            *(f"--{flag} {value}" for flag, value in flags.items()),
            *args.overrides,
        ]
    )
    text = "\n\n".join([f"bf16, {ROWS} x {LENGTH}", table(lines), *dict.fromkeys(messages)])
    report_result(
        "transformers_models", "SFT of published model shapes beside other trainers", command, text, args.write
    )
    if args.write:
        write_numbers(
            "transformers_models",
            {"command": command, "rows": ROWS, "length": LENGTH, "machine": machine_line(), "cases": lines},
        )


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--path", required=True, help="rows of conversations or instructions, e.g. alpaca_zh_demo.json")
    parser.add_argument("--models", help="only models whose name contains one of these: Qwen+Pythia")
    parser.add_argument("--cases", help=f"only these, joined by +, of {OURS}; {TRAINER}; {TRL}; ours, packed; ...")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("overrides", nargs="*", help="overrides of our runs")
    parser.set_defaults(stage="sft")
    main(parser.parse_args())
