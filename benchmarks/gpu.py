"""The engine's step on a GPU against the peak of that GPU and other trainers: python benchmarks/gpu.py [--path FILE]
[--models minimind_26m+1b] [--cases "bf16+HF Trainer, compiled"] [--optimizer muon] [--tokens 32768] [--minutes 7]
[--profile] [--write].

Each case is a process of its own on the same GPU; while one does its turn of several steps, the others wait; medians
over the rounds. If the GPU's memory does not hold all cases of a model, each takes turns with the peak of its precision
only, with a message. Rows are packed with a document mask, the loss is fused with the head; batches are made before, so
that the data is not measured. Useful tokens are those without padding. The peak is that of a large matrix product in
the same precision; memory is torch's maximum on the GPU; the first step counts from the start of the process, with
tokenized rows and nothing compiled. --write stores the result after each round; no round after the first and no further
model begins later than --minutes. --profile runs one more turn of each case: launches of a step, the time in which the
device computes, and its longest kernels. MFU is the share of the nominal peak of the card in this precision, without
sparsity. Trainers that are not installed or given (--litgpt CHECKOUT, --nanochat) are left out and named. Without a GPU nothing is measured; `--device cpu` measures the same on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lib.interleave import CaseProcess, case_spec, flops_per_second, measure, ratio, tokens_per_second
from lib.results import result_parser, write_numbers, write_result
from lib.runs import SAMPLES
from lib.trainers import why_left_out as why_trainer_is_left_out

MODELS = {  # name -> overrides, rows per step on a GPU
    "tiny": (["model=tiny"], 64),
    "minimind_26m": (["model=minimind_26m"], 32),
    "minimind_64m": (["model=minimind_64m"], 24),
    "minimind_104m": (["model=minimind_104m"], 12),
    "1b": (["model=minimind_104m", "model.name=1b", "model.hidden_size=2048", "model.num_hidden_layers=21", "model.num_attention_heads=16",
            "model.num_key_value_heads=8", "model.head_dim=128", "model.intermediate_size=5632"], 8),
}  # fmt: skip
CASES = {  # name -> case of lib/case_process.py, precision, train.compile
    "fp32": ("ours", "fp32", "default"),
    "tf32": ("ours", "tf32", "default"),
    "bf16 plain": ("ours", "bf16", "off"),
    "bf16": ("ours", "bf16", "default"),
    "bf16 graphs": ("ours", "bf16", "reduce-overhead"),
    "HF Trainer": ("HF Trainer, packed", "bf16", None),
    "HF Trainer, compiled": ("HF Trainer, packed, compiled", "bf16", None),
    "litgpt, compiled": ("litgpt, equal lengths, compiled", "bf16", None),
    "nanochat, its own model, compiled": ("nanochat, its own model, equal lengths, compiled", "bf16", None),
}
NOMINAL = {  # part of a card's name -> precision -> TFLOP/s of its data sheet, without sparsity
    "H100 NVL": {"bf16": 835, "tf32": 418},
    "H100 PCIe": {"bf16": 756, "tf32": 378},
    "H100": {"bf16": 989, "tf32": 495},
    "H200": {"bf16": 989, "tf32": 495},
    "A100": {"bf16": 312, "tf32": 156},
    "L40S": {"bf16": 362, "tf32": 183},
    "L4": {"bf16": 121, "tf32": 60},
    "A10": {"bf16": 125, "tf32": 62},
    "RTX 4090": {"bf16": 165, "tf32": 82},
    "RTX 3090 Ti": {"bf16": 80, "tf32": 40},
    "RTX 3090": {"bf16": 71, "tf32": 36},
}
CPU_ROWS = 4  # per step
SAMPLE = str(SAMPLES / "pretrain.jsonl")
STATE_BYTES = 16  # per parameter: weight, gradient and two moments
ACTIVATION_BYTES = 100  # per token, layer and channel, roughly: more in fp32, fewer in compiled bf16
MAX_FILL = 0.8  # of the GPU's memory
HEAD = (
    "| case | useful tokens/s | raw tokens/s | useful share | share of peak | MFU | launches | busy, ms | step, ms | peak memory, MB | first step, s "
    "| useful, relative to bf16 |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def why_left_out(case: str, args: argparse.Namespace) -> str | None:
    """Return why a case cannot run on this device, or None."""
    import torch

    from runner.engine.device.precision import PrecisionConfig

    name, precision, compile = CASES[case]
    if args.device == "cpu" and compile == "reduce-overhead":
        return "CUDA graphs need a GPU"
    try:
        PrecisionConfig(precision).check_device(
            args.device, None if args.device == "cpu" or torch.version.hip else torch.cuda.get_device_capability()
        )
    except ValueError as error:
        return str(error.args[0])
    return why_trainer_is_left_out(name, vars(args))


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


def case_specs(names: list[str], spec: dict) -> list[tuple[str, dict]]:
    """Return (name, spec) of these cases, after the peak of each of their precisions."""
    specs = [
        ("machine", spec | {"case": "machine", "precision": precision})
        for precision in sorted({CASES[name][1] for name in names})
    ]
    keys = ("case", "precision", "compile")
    return specs + [(name, spec | dict(zip(keys, CASES[name], strict=True))) for name in names]


def nominal_flops(precision: str) -> float | None:
    """Return the operations per second that the data sheet of this GPU names; None if it is not in NOMINAL."""
    import torch

    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    peaks = next((peaks for part, peaks in NOMINAL.items() if re.search(rf"\b{part}\b", card)), {})
    return peaks[precision] * 1e12 if precision in peaks else None


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
                "mfu": (case.median(flops_per_second) / peak if (peak := nominal_flops(case.precision)) else None),
                "step_seconds": case.median(lambda step: step["seconds"]) / case.steps_per_turn,
                "profile": case.profile,
                "useful_against_bf16": None
                if base is None
                else ratio(tokens_per_second, case, base) * case.fill_ratio / base.fill_ratio,
            }


def table(lines: list[dict[str, Any]]) -> str:
    def number_text(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rows = []
    for line in lines:
        profile = line["profile"]
        busy = None if "busy" not in profile else profile["busy"] * 1e3
        rows.append(
            f"| {line['case']} | {line['useful_tokens_per_second']:,.0f} | {line['raw_tokens_per_second']:,.0f} | {line['useful_share']:.1%} | "
            f"{line['share_of_peak']:.1%} of {line['peak_tflops']:,.1f} TFLOP/s | {number_text(line['mfu'], '.1%')} | {number_text(profile.get('launches'), ',.0f')} | "
            f"{number_text(busy, '.1f')} | {line['step_seconds'] * 1e3:.1f} | {line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | "
            f"{number_text(line['useful_against_bf16'], '.2f')} |"
        )
    longest = [
        f"- {line['case']}: " + ", ".join(f"{name} {share:.0%}" for name, share in line["profile"]["longest"])
        for line in lines
        if "longest" in line["profile"]
    ]
    return "\n".join([HEAD, *rows, *([""] + longest if longest else [])])


def measure_model(name: str, args: argparse.Namespace, folder: str, report: Callable[[dict], None]) -> None:
    """Call `report` with the result so far after each round, and at the end."""
    overrides, rows = MODELS[name]
    rows = args.rows or (args.tokens // args.length if args.tokens else rows if args.device == "cuda" else CPU_ROWS)
    spec = case_spec(
        [*overrides, f"device={args.device}", *args.overrides],
        stage="pretrain", path=args.path, tokenizer=args.tokenizer, rows=rows, length=args.length, folder=folder, optimizer=args.optimizer,
    ) | {"device": args.device, "steps_per_turn": args.steps_per_turn, "reused_batches": 16, "litgpt": args.litgpt, "nanochat": args.nanochat}  # fmt: skip
    names = [case for case in CASES if not args.cases or case in args.cases.split("+")]
    if not names:
        raise SystemExit(f"--cases must be of {', '.join(CASES)}, joined by +, got {args.cases}")
    reasons = {case: reason for case in names if (reason := why_left_out(case, args))}
    groups = simultaneous_cases([case for case in names if case not in reasons], spec)
    lines, messages = list[dict[str, Any]](), [f"left out: {case}: {reason}" for case, reason in reasons.items()]
    if len(groups) > 1:
        messages.append(
            "the GPU's memory does not hold all cases at once: each took turns with the peak of its precision only"
        )

    def report_so_far(cases: list[CaseProcess]) -> None:
        measured = {"cases": [*lines, *results(cases)], "messages": messages}
        report({"model": name, "parameters": spec["parameters"], "rows": rows, **measured})

    for group in groups:
        cases, failed = measure(
            case_specs(group, spec),
            args.rounds,
            profiles=args.profile,
            after_round=report_so_far,
            deadline=args.deadline,
        )
        messages += failed
        report_so_far(cases)
        lines += results(cases)


def model_text(result: dict[str, Any], args: argparse.Namespace) -> str:
    title = f"{result['model']}, {result['parameters']:,} parameters, {result['rows']} x {args.length}:"
    return "\n\n".join([title, *([table(result["cases"])] if result["cases"] else []), *result["messages"]])


def main(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        return print("no CUDA device: nothing is measured; --device cpu measures the same on a CPU")
    if unknown := [name for name in args.models.split("+") if name not in MODELS]:
        sys.exit(f"--models must be of {', '.join(MODELS)}, got {', '.join(unknown)}")
    args.deadline = time.monotonic() + 60 * args.minutes
    device = torch.cuda.get_device_name(0) if args.device == "cuda" else f"{os.cpu_count()} cores"
    settings = ("length", "rounds", "steps_per_turn", "optimizer")
    about = {"command": command_of(args), "device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {name: getattr(args, name) for name in settings} | {"data": Path(args.path).name}
    head = f"{device}, torch {torch.__version__}, {args.optimizer}; {args.rounds} rounds of {args.steps_per_turn} steps, each case a process of its own."
    models = dict[str, dict[str, Any]]()

    def text() -> str:
        return "\n\n".join([head, *(model_text(model, args) for model in models.values())])

    def report(result: dict[str, Any]) -> None:
        models[result["model"]] = result
        if args.write:
            name = f"gpu-{device.replace(' ', '_').lower()}"
            write_result(name, f"Step time on {device}", about["command"], text())
            write_numbers(name, about | {"models": list(models.values())})

    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split("+"):
            if models and time.monotonic() > args.deadline:
                report(
                    {
                        "model": name,
                        "parameters": 0,
                        "rows": 0,
                        "cases": [],
                        "messages": ["not measured: the time was over"],
                    }
                )
            else:
                measure_model(name, args, folder, report)
    print(text())


def command_of(args: argparse.Namespace) -> str:
    """Return the command that measures this again, without the paths of this machine."""
    flags = {
        "device": args.device,
        "models": args.models,
        "length": args.length,
        "rounds": args.rounds,
        "steps-per-turn": args.steps_per_turn,
        "optimizer": args.optimizer,
    }
    flags |= {"path": Path(args.path).name} if args.path != SAMPLE else {}
    flags |= {name: value for name in ("rows", "tokens") if (value := getattr(args, name))}
    flags |= {"minutes": args.minutes} if args.minutes < math.inf else {}
    flags |= {"profile": ""} if args.profile else {}
    flags |= {"cases": f'"{args.cases}"'} if args.cases else {}
    return " ".join(
        ["python benchmarks/gpu.py", *(f"--{name} {value}".rstrip() for name, value in flags.items()), *args.overrides]
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
    parser.add_argument("--tokens", type=int, help="per step, instead of --rows")
    parser.add_argument("--optimizer", default="adamw", help="of our engine")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no round and no model begins")
    parser.add_argument("--profile", action="store_true", help="launches, and the longest kernels")
    parser.add_argument("--litgpt", type=str, help="a checkout")
    parser.add_argument("--nanochat", type=str, help="a checkout")
    parser.add_argument("--length", type=int, default=1024, help="tokens per packed sequence")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps-per-turn", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    main(parser.parse_args())
