"""Our step on a GPU, beside what that GPU can do: python benchmarks/gpu.py [--path FILE] [--models minimind_26m+1b] [--write].

Each case is a process of its own, all on the same card, and while one makes its turn of several steps the others hold still; medians over the
rounds. Where the card cannot hold all cases of a model, each runs alone, beside the machine's peak only, and it is said. Rows are packed and
attend to themselves only, the loss is fused with the head; batches are made beforehand, for feeding is not what is measured. Useful tokens are those
that are no padding. A share of peak is that of a large matrix product in the same precision; memory is what torch held on the card at most; a
first step counts from the start of its process, with rows prepared and nothing compiled. Without a GPU nothing is measured; `--device cpu` goes the
same way with what a processor can do.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.interleave import ROOT, Case, beside, measure, spec_of, speed, started, work
from lib.results import keep, tell

MODELS = {  # name -> words, lines of a step on a GPU
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
    "fp8": ("fp8", "default"),
}
SAMPLE = str(ROOT / "data" / "samples" / "pretrain.jsonl")
STATE = 16  # bytes a parameter: weight, gradient and two moments
ACTIVATIONS = 100  # bytes a channel of a layer and position, roughly: fp32 needs more, compiled bf16 less
HEAD = (
    "| case | useful tokens/s | raw tokens/s | filled | share of peak | peak memory, MB | first step, s | useful, against bf16 |\n"
    "|---|---|---|---|---|---|---|---|"
)


def why_not(name: str, device: str) -> str | None:
    """Why a case cannot be run on this device."""
    import torch

    from runner.engine.device.precision import PrecisionConfig

    precision, compile = CASES[name]
    if device == "cpu" and compile == "reduce-overhead":
        return "CUDA graphs are recorded on a GPU"
    try:
        PrecisionConfig(precision).check_device(device, None if device == "cpu" or torch.version.hip else torch.cuda.get_device_capability())
    except ValueError as refusal:
        return str(refusal.args[0])
    return None


def groups(names: list[str], spec: dict) -> list[list[str]]:
    """Cases that are there together: all of them, or each by itself where they would not leave a fifth of the card free."""
    import torch

    model, positions = spec["model"], spec["lines"] * spec["length"]
    each = STATE * spec["parameters"] + ACTIVATIONS * model["num_hidden_layers"] * model["hidden_size"] * positions
    if spec["device"] == "cuda" and each * len(names) > 0.8 * torch.cuda.get_device_properties(0).total_memory:
        return [[name] for name in names]
    return [names]


def measured(names: list[str], spec: dict, rounds: int) -> tuple[list[Case], list[str]]:
    """These cases and the peaks of their precisions, all taking turns; and what is said of those that broke down."""
    wanted = [("machine", spec | {"case": "machine", "precision": precision}) for precision in sorted({CASES[name][0] for name in names})]
    wanted += [(name, spec | {"case": "ours", "precision": CASES[name][0], "compile": CASES[name][1]}) for name in names]
    cases, said = started(wanted)
    try:
        said += measure(cases, rounds)
    finally:
        for case in cases:
            case.close()
    return cases, said


def found(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """One line for each case, beside the machine that took turns with it."""
    machines = {case.precision: case for case in cases if case.name == "machine"}
    base = next((case for case in cases if case.name == "bf16"), None)
    for case in cases:
        if case.name != "machine" and case.precision in machines:
            yield {
                "case": case.name,
                "precision": case.precision,
                "useful_tokens_per_second": case.median(speed) * case.filled,
                "raw_tokens_per_second": case.median(speed),
                "filled": case.filled,
                "share_of_peak": beside(work, case, machines[case.precision]),
                "peak_tflops": machines[case.precision].median(work) / 1e12,
                "copy_gb_per_second": machines[case.precision].median(lambda step: step["copied"]) / 1e9,
                "peak_memory_mb": max(step["memory"] for step in case.steps),
                "first_step_seconds": case.first,
                "useful_against_bf16": None if base is None else beside(speed, case, base) * case.filled / base.filled,
            }


def table(lines: list[dict[str, Any]]) -> str:
    return "\n".join([HEAD] + [
        f"| {line['case']} | {line['useful_tokens_per_second']:,.0f} | {line['raw_tokens_per_second']:,.0f} | {line['filled']:.1%} | "
        f"{line['share_of_peak']:.1%} of {line['peak_tflops']:,.1f} TFLOP/s | {line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | "
        f"{'' if line['useful_against_bf16'] is None else format(line['useful_against_bf16'], '.2f')} |"
        for line in lines
    ])  # fmt: skip


def of_model(name: str, asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """All that is found out about one model."""
    words, lines = MODELS[name]
    lines = asked.lines or (lines if asked.device == "cuda" else 4)
    spec = spec_of(
        [*words, f"device={asked.device}", *asked.words],
        stage="pretrain", path=asked.path, tokenizer=asked.tokenizer, lines=lines, length=asked.length, folder=folder,
    ) | {"device": asked.device, "stretch": asked.stretch, "made": 16}  # fmt: skip
    names = [case for case in CASES if not asked.cases or case in asked.cases.split("+")]
    if not names:
        raise SystemExit(f"--cases {asked.cases}: there are {', '.join(CASES)}")
    reasons = {case: reason for case in names if (reason := why_not(case, asked.device))}
    together = groups([case for case in names if case not in reasons], spec)
    rows, said = list[dict[str, Any]](), [f"left out: {case}: {reason}" for case, reason in reasons.items()]
    for group in together:
        cases, failed = measured(group, spec, asked.rounds)
        rows, said = rows + list(found(cases)), said + failed
    if len(together) > 1:
        said.append("the card does not hold all cases at once: each took turns with the peak of its precision only")
    return {"model": name, "parameters": spec["parameters"], "lines": lines, "cases": rows, "said": said}


def shown(of: dict[str, Any], asked: argparse.Namespace) -> str:
    title = f"{of['model']}, {of['parameters']:,} parameters, {of['lines']} x {asked.length}:"
    return "\n\n".join([title, *([table(of["cases"])] if of["cases"] else []), *of["said"]])


def main(asked: argparse.Namespace) -> None:
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        return print("no CUDA device here: nothing measured; --device cpu goes the same way with what a processor can do")
    if unknown := [name for name in asked.models.split("+") if name not in MODELS]:
        sys.exit(f"no such model: {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as folder:
        models = [of_model(name, asked, folder) for name in asked.models.split("+")]
    device = torch.cuda.get_device_name(0) if asked.device == "cuda" else f"{os.cpu_count()} cores"
    command = command_of(asked)
    about = {"command": command, "date": str(datetime.date.today()), "device": device, "torch": torch.__version__, "cuda": torch.version.cuda}
    about |= {"length": asked.length, "rounds": asked.rounds, "steps_of_a_turn": asked.stretch, "data": Path(asked.path).name}
    text = "\n\n".join(
        [
            f"{device}, torch {torch.__version__}; {asked.rounds} rounds of {asked.stretch} steps, each case a process of its own on it.",
            *(shown(model, asked) for model in models),
        ]
    )
    name = f"gpu-{device.replace(' ', '_').lower()}"
    tell(name, f"A step on {device}", command, text, asked.write)
    if asked.write:
        keep(name, about | {"models": models})


def command_of(asked: argparse.Namespace) -> str:
    """What anybody types to have this made again."""
    flags = {name: getattr(asked, name) for name in ("device", "models", "length", "rounds", "stretch")}
    flags |= {"path": Path(asked.path).name} if asked.path != SAMPLE else {}
    flags |= ({"lines": asked.lines} if asked.lines else {}) | ({"cases": f'"{asked.cases}"'} if asked.cases else {})
    return " ".join(["python benchmarks/gpu.py", *(f"--{name} {value}" for name, value in flags.items()), *asked.words])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--path", default=SAMPLE)
    parser.add_argument("--tokenizer", default=str(ROOT / "data" / "samples" / "tokenizer"))
    parser.add_argument("--models", default="minimind_26m+minimind_64m+minimind_104m+1b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}, joined by +")
    parser.add_argument("--lines", type=int, help="windows of a step, instead of what suits each model")
    parser.add_argument("--length", type=int, default=1024, help="positions of a window")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--stretch", type=int, default=10, help="steps of a turn")
    parser.add_argument("--write", action="store_true", help="keep table and numbers in benchmarks/results/")
    parser.add_argument("words", nargs="*", help="words of train.py on top")
    main(parser.parse_args())
