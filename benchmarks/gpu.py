"""The engine's step on a GPU against the peak of that GPU: python benchmarks/gpu.py [--path FILE] [--models
minimind_26m+1b] [--write].

Each case is a process of its own on the same GPU; while one does its turn of several steps, the others wait; medians
over the rounds. If the GPU's memory does not hold all cases of a model, each takes turns with the peak of its precision
only, with a message. Rows are packed with a document mask, the loss is fused with the head; batches are made before, so
that the data is not measured. Useful tokens are those without padding. The peak is that of a large matrix product in
the same precision; memory is torch's maximum on the GPU; the first step counts from the start of the process, with
tokenized rows and nothing compiled. Without a GPU nothing is measured; `--device cpu` measures the same on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.interleave import CaseProcess, case_spec, flops_per_second, measure, ratio, tokens_per_second
from lib.results import report_result, result_parser, write_numbers
from lib.runs import SAMPLES

MODELS = {  # name -> overrides, rows per step on a GPU
    "tiny": (["model=tiny"], 64),
    "minimind_26m": (["model=minimind_26m"], 32),
    "minimind_64m": (["model=minimind_64m"], 24),
    "minimind_104m": (["model=minimind_104m"], 12),
    "1b": (["model=minimind_104m", "model.name=1b", "model.hidden_size=2048", "model.num_hidden_layers=21", "model.num_attention_heads=16",
            "model.num_key_value_heads=8", "model.head_dim=128", "model.intermediate_size=5632"], 8),
}  # fmt: skip
CASES = {  # name -> precision, train.compile
    "fp32": ("fp32", "default"),
    "tf32": ("tf32", "default"),
    "bf16 plain": ("bf16", "off"),
    "bf16": ("bf16", "default"),
    "bf16 graphs": ("bf16", "reduce-overhead"),
}
CPU_ROWS = 4  # per step
SAMPLE = str(SAMPLES / "pretrain.jsonl")
STATE_BYTES = 16  # per parameter: weight, gradient and two moments
ACTIVATION_BYTES = 100  # per token, layer and channel, roughly: more in fp32, fewer in compiled bf16
MAX_FILL = 0.8  # of the GPU's memory
HEAD = (
    "| case | useful tokens/s | raw tokens/s | useful share | share of peak | peak memory, MB | first step, s | useful, relative to bf16 |\n"
    "|---|---|---|---|---|---|---|---|"
)


def why_left_out(case: str, device: str) -> str | None:
    """Return why a case cannot run on this device, or None."""
    import torch

    from runner.engine.device.precision import PrecisionConfig

    precision, compile = CASES[case]
    if device == "cpu" and compile == "reduce-overhead":
        return "CUDA graphs need a GPU"
    try:
        PrecisionConfig(precision).check_device(
            device, None if device == "cpu" or torch.version.hip else torch.cuda.get_device_capability()
        )
    except ValueError as error:
        return str(error.args[0])
    return None


def simultaneous_cases(names: list[str], spec: dict) -> list[list[str]]:
    """Return groups of cases that run at the same time: all, or each alone where the GPU's memory would not hold all."""
    import torch

    model, tokens = spec["model"], spec["rows"] * spec["length"]
    each = (
        STATE_BYTES * spec["parameters"] + ACTIVATION_BYTES * model["num_hidden_layers"] * model["hidden_size"] * tokens
    )
    if spec["device"] == "cuda" and each * len(names) > MAX_FILL * torch.cuda.get_device_properties(0).total_memory:
        return [[name] for name in names]
    return [names]


def measure_group(names: list[str], spec: dict, rounds: int) -> tuple[list[CaseProcess], list[str]]:
    """Measure these cases and the peak of each of their precisions; return them, and a message per case that failed."""
    specs = [
        ("machine", spec | {"case": "machine", "precision": precision})
        for precision in sorted({CASES[name][0] for name in names})
    ]
    specs += [(name, spec | {"case": "ours", "precision": CASES[name][0], "compile": CASES[name][1]}) for name in names]
    return measure(specs, rounds)


def results(cases: list[CaseProcess]) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each case whose machine could be measured."""
    machines = {case.precision: case for case in cases if case.name == "machine"}
    base = next((case for case in cases if case.name == "bf16"), None)
    for case in cases:
        if case.name != "machine" and case.precision in machines:
            yield {
                "case": case.name,
                "precision": case.precision,
                "useful_tokens_per_second": case.median(tokens_per_second) * case.fill_ratio,
                "raw_tokens_per_second": case.median(tokens_per_second),
                "useful_share": case.fill_ratio,
                "share_of_peak": ratio(flops_per_second, case, machines[case.precision]),
                "peak_tflops": machines[case.precision].median(flops_per_second) / 1e12,
                "copy_gb_per_second": machines[case.precision].median(lambda step: step["copied"]) / 1e9,
                "peak_memory_mb": max(step["memory"] for step in case.steps),
                "first_step_seconds": case.first_step_seconds,
                "useful_against_bf16": None
                if base is None
                else ratio(tokens_per_second, case, base) * case.fill_ratio / base.fill_ratio,
            }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"| {line['case']} | {line['useful_tokens_per_second']:,.0f} | {line['raw_tokens_per_second']:,.0f} | {line['useful_share']:.1%} | "
        f"{line['share_of_peak']:.1%} of {line['peak_tflops']:,.1f} TFLOP/s | {line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | "
        f"{'' if line['useful_against_bf16'] is None else format(line['useful_against_bf16'], '.2f')} |"
        for line in lines
    ]
    return "\n".join([HEAD, *rows])


def measure_model(name: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    overrides, rows = MODELS[name]
    rows = args.rows or (rows if args.device == "cuda" else CPU_ROWS)
    spec = case_spec(
        [*overrides, f"device={args.device}", *args.overrides],
        stage="pretrain", path=args.path, tokenizer=args.tokenizer, rows=rows, length=args.length, folder=folder,
    ) | {"device": args.device, "steps_per_turn": args.steps_per_turn, "reused_batches": 16}  # fmt: skip
    names = [case for case in CASES if not args.cases or case in args.cases.split("+")]
    if not names:
        raise SystemExit(f"--cases must be of {', '.join(CASES)}, got {args.cases}")
    reasons = {case: reason for case in names if (reason := why_left_out(case, args.device))}
    groups = simultaneous_cases([case for case in names if case not in reasons], spec)
    lines, messages = list[dict[str, Any]](), [f"left out: {case}: {reason}" for case, reason in reasons.items()]
    for group in groups:
        cases, failed = measure_group(group, spec, args.rounds)
        lines, messages = lines + list(results(cases)), messages + failed
    if len(groups) > 1:
        messages.append(
            "the GPU's memory does not hold all cases at once: each took turns with the peak of its precision only"
        )
    return {"model": name, "parameters": spec["parameters"], "rows": rows, "cases": lines, "messages": messages}


def model_text(result: dict[str, Any], args: argparse.Namespace) -> str:
    title = f"{result['model']}, {result['parameters']:,} parameters, {result['rows']} x {args.length}:"
    return "\n\n".join([title, *([table(result["cases"])] if result["cases"] else []), *result["messages"]])


def main(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return print("no CUDA device: nothing is measured; --device cpu measures the same on a CPU")
    if unknown := [name for name in args.models.split("+") if name not in MODELS]:
        sys.exit(f"--models must be of {', '.join(MODELS)}, got {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as folder:
        models = [measure_model(name, args, folder) for name in args.models.split("+")]
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else f"{os.cpu_count()} cores"
    about = {"command": command_of(args), "device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {
        "length": args.length,
        "rounds": args.rounds,
        "steps_per_turn": args.steps_per_turn,
        "data": Path(args.path).name,
    }
    head = f"{device}, torch {torch.__version__}; {args.rounds} rounds of {args.steps_per_turn} steps, each case a process of its own."
    name = f"gpu-{device.replace(' ', '_').lower()}"
    report_result(
        name,
        f"Step time on {device}",
        about["command"],
        "\n\n".join([head, *(model_text(model, args) for model in models)]),
        args.write,
    )
    if args.write:
        write_numbers(name, about | {"models": models})


def command_of(args: argparse.Namespace) -> str:
    """Return the command that measures this again, without the paths of this machine."""
    flags = {
        "device": args.device,
        "models": args.models,
        "length": args.length,
        "rounds": args.rounds,
        "steps-per-turn": args.steps_per_turn,
    }
    flags |= {"path": Path(args.path).name} if args.path != SAMPLE else {}
    flags |= ({"rows": args.rows} if args.rows else {}) | ({"cases": f'"{args.cases}"'} if args.cases else {})
    return " ".join(
        ["python benchmarks/gpu.py", *(f"--{name} {value}" for name, value in flags.items()), *args.overrides]
    )


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--path", default=SAMPLE)
    parser.add_argument("--tokenizer", default=str(SAMPLES / "tokenizer"))
    parser.add_argument(
        "--models", default="minimind_26m+minimind_64m+minimind_104m+1b", help=f"of {', '.join(MODELS)}, joined by +"
    )
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}, joined by +")
    parser.add_argument("--rows", type=int, help="packed sequences per step, instead of the number of each model")
    parser.add_argument("--length", type=int, default=1024, help="tokens per packed sequence")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps-per-turn", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    main(parser.parse_args())
