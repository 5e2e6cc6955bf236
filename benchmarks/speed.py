"""The engine's step against the peak of the machine and other trainers: python benchmarks/speed.py [--path FILE]
[--stage pretrain|sft] [--write].

Same model, data, tokenizer, batch size and precision for all cases. Each is a process of its own and they take turns
step by step, so that other load on the machine affects all; a process is stopped while it waits; medians over the
rounds. Each trainer runs as its users start it: the environment of this command, to which only our own engine adds what
our command decides. `--environments own+best` measures each also with the best of a few thread settings, found in a
short trial. `--summary` writes the table over all stored machines. Useful tokens are those without padding. Trainers
that are not installed (`pip install lm-runner[bench]`: Hugging Face's Trainer and TRL) or not given (--minimind
CHECKOUT, --litgpt, --nanochat) are left out and named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.environment import LIMITS, describe_facts
from lib.interleave import CaseProcess, case_spec, flops_per_second, measure, ratio, tokens_per_second
from lib.results import RESULTS, file_part, machine_facts, machine_name, report_result, result_parser, write_numbers
from lib.runs import SAMPLES
from lib.speed_summary import summary_table
from lib.trainers import CHECKOUTS, why_left_out

ROWS, LENGTH = 4, 512  # rows per step, tokens per row
# processor time does not depend on other load; with OMP_NUM_THREADS=1 no thread waits for another
CLOCKS = ("seconds", "cpu")
PRECISIONS = ("fp32", "bf16")
FACTS = machine_facts()  # before modules are imported that add variables
HEAD = (
    "| case | environment | useful tokens/s | raw tokens/s | useful share | share of peak | peak memory, MB | first step, s | useful, relative to the first "
    "| share of peak, processor time | useful, processor time |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def write_rows(args: argparse.Namespace, folder: str) -> dict[str, str]:
    """Write the rows as the other trainers read them: MiniMind's conversations, TRL's messages, or texts. Return name
    -> path.
    """
    from data.schemas.registry import detect_schema
    from data.sources.files import Source

    source, data_format = Source.open(args.path), "text" if args.stage == "pretrain" else "chat"
    files = {name: str(Path(folder) / f"{name}.jsonl") for name in ("minimind", "messages")}
    with (
        open(files["minimind"], "w", encoding="utf-8") as minimind,
        open(files["messages"], "w", encoding="utf-8") as messages,
    ):
        for position, row in source.rows():
            example: Any = detect_schema(row, data_format, source.where(position)).read(row, source.where(position))
            if data_format == "chat":
                turns = [{"role": turn["role"], "content": turn["content"]} for turn in example.messages]
                print(json.dumps({"messages": turns}, ensure_ascii=False), file=messages)
                turns = [turn | dict.fromkeys(("reasoning_content", "tools", "tool_calls"), "") for turn in turns]
                print(json.dumps({"conversations": turns}, ensure_ascii=False), file=minimind)
            else:
                for file in (messages, minimind):
                    print(json.dumps({"text": example.text}, ensure_ascii=False), file=file)
    return files


def results(cases: list[CaseProcess], precision: str) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each case in this precision; none if the peak of the machine could not be measured."""
    machine = next((case for case in cases if case.name == "machine" and case.precision == precision), None)
    trainers = [case for case in cases if case.name != "machine" and case.precision == precision] if machine else []
    for case in trainers:
        shares = {clock: ratio(flops_per_second, case, machine, clock) for clock in CLOCKS}
        ratios = {clock: ratio(tokens_per_second, case, trainers[0], clock) for clock in CLOCKS}
        fill = case.fill_ratio / trainers[0].fill_ratio
        yield {
            "precision": precision,
            "case": case.name,
            "setting": case.setting,
            "environment": case.facts,
            "kernels": case.steps[-1].get("kernels", ""),  # that our engine has chosen
            "useful_tokens_per_second": case.median(tokens_per_second) * case.fill_ratio,
            "raw_tokens_per_second": case.median(tokens_per_second),
            "useful_share": case.fill_ratio,
            "share_of_peak": shares["seconds"],
            "peak_memory_mb": max(step["memory"] for step in case.steps),
            "first_step_seconds": case.first_step_seconds,
            "useful_against_first": ratios["seconds"] * fill,
            "share_of_peak_cpu": shares["cpu"],
            "useful_against_first_cpu": ratios["cpu"] * fill,
        }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"| {line['case']} | {line['setting']} | {line['useful_tokens_per_second']:,.0f} | {line['raw_tokens_per_second']:,.0f} | {line['useful_share']:.1%} | "
        f"{line['share_of_peak']:.1%} | {line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | "
        f"{line['useful_against_first']:.2f} | {line['share_of_peak_cpu']:.1%} | {line['useful_against_first_cpu']:.2f} |"
        for line in lines
    ]
    processes = [
        f"- {line['case']}, {line['setting']}: {describe_facts(line['environment'])}"
        + (f"; {line['kernels']}" if line["kernels"] else "")
        for line in lines
    ]
    return "\n".join([HEAD, *rows, "", "What each process had:", "", *processes])


def shared_spec(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Return what the specs of all cases share."""
    from data.tokenize.tokenizer import Tokenizer

    tokenizer = str(Path(args.tokenizer).resolve())
    checkouts = {name: str(Path(path).resolve()) for name in CHECKOUTS.values() if (path := getattr(args, name))}
    overrides = [f"model={args.model}", *args.overrides]
    spec = case_spec(
        overrides, stage=args.stage, path=args.path, tokenizer=tokenizer, rows=ROWS, length=LENGTH, folder=folder
    )
    return (
        spec
        | checkouts
        | {"tokenizer": tokenizer, "pad_id": Tokenizer.load(Path(tokenizer)).pad_id, "files": write_rows(args, folder)}
    )


def choose_cases(args: argparse.Namespace, spec: dict) -> tuple[list[tuple[str, dict]], list[str]]:
    """Return (name, spec) of the cases that can run here, and a message per case that cannot."""
    from lib.case_process import CASES, EXTRA_CASES

    chosen, messages = list[tuple[str, dict]](), list[str]()
    if unknown := set(args.precision.split(",")) - set(PRECISIONS):
        raise SystemExit(f"--precision must be of {', '.join(PRECISIONS)}, got {', '.join(unknown)}")
    for precision in args.precision.split(","):
        for name in CASES | EXTRA_CASES if args.cases else CASES:
            if name != "machine" and args.cases and not any(part in name for part in args.cases.split("+")):
                continue
            if reason := why_left_out(name, vars(args)):
                messages.append(f"left out: {name}, {precision}: {reason}")
            else:
                chosen.append((name, spec | {"case": name, "precision": precision}))
    return chosen, messages


def write_summary() -> None:
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("speed-*.json"))]
    text = (
        "Useful tokens per second of the compiled, packed step relative to each other trainer, each as its users run it (in brackets: each with its best\n"
        f"thread setting), and its share of the matrix peak. The worst machine comes first.\n\n{summary_table(results)}\n"
    )
    (RESULTS / "speed-summary.md").write_text(
        f"# Speed over machines\n\n`python benchmarks/speed.py --summary`\n\n{text}", encoding="utf-8"
    )
    print(text)


def main(args: argparse.Namespace) -> None:
    if args.summary:
        return write_summary()
    with tempfile.TemporaryDirectory() as folder:
        chosen, left_out = choose_cases(args, shared_spec(args, folder))
        cases, failed = measure(chosen, args.rounds, with_best=args.environments == "own+best")
    messages = sorted({*left_out, *failed})
    lines = [line for precision in args.precision.split(",") for line in results(cases, precision)]
    machine = {
        case.precision: {
            "gflops": case.median(flops_per_second) / 1e9,
            "copy_gb_per_second": case.median(lambda step: step["copied"]) / 1e9,
        }
        for case in cases
        if case.name == "machine"
    }
    workload = Path(args.path).stem.removesuffix("_demo")
    about = {
        "command": command_of(args),
        "workload": workload,
        "stage": args.stage,
        "model": args.model,
        "rows": ROWS,
        "length": LENGTH,
    }
    about |= {"rounds": args.rounds, "environments": args.environments, **FACTS}
    if args.json:
        text = "\n".join(
            json.dumps(line, ensure_ascii=False)
            for line in [about, {"machine": machine}, *lines, *({"message": line} for line in messages)]
        )
    else:
        parts = [
            f"{precision}, {ROWS} x {LENGTH}; matrix product {peak['gflops']:,.0f} GFLOP/s, copy {peak['copy_gb_per_second']:.0f} GB/s:\n\n"
            f"{table([line for line in lines if line['precision'] == precision])}"
            for precision, peak in machine.items()
        ]
        text = "\n\n".join([*parts, *messages])
    name = f"speed-{file_part(machine_name(about))}-{workload}-{args.precision.replace(',', '-')}"
    report_result(
        name,
        f"Step time of {args.model} and of other trainers, {args.stage}",
        about["command"],
        text,
        args.write and not args.json,
    )
    if args.write:
        write_numbers(name, about | {"machine": machine, "cases": lines, "messages": messages})


def command_of(args: argparse.Namespace) -> str:
    """Return the command that measures this again, without the paths of this machine."""
    flags = {
        "path": Path(args.path).name,
        "stage": args.stage,
        "model": args.model,
        "precision": args.precision,
        "rounds": args.rounds,
    }
    flags |= {"environments": args.environments} if args.environments != "own" else {}
    flags |= {"cases": f'"{args.cases}"'} if args.cases else {}
    flags |= {name: "CHECKOUT" for name in CHECKOUTS.values() if getattr(args, name)}
    limits = [f"{name}={FACTS['variables'][name]}" for name in LIMITS if name in FACTS["variables"]]
    return " ".join(
        [
            *limits,
            "python benchmarks/speed.py",
            *(f"--{name} {value}" for name, value in flags.items()),
            *args.overrides,
        ]
    )


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--path", default=str(SAMPLES / "pretrain.jsonl"))
    parser.add_argument("--stage", default="pretrain", choices=["pretrain", "sft"])
    parser.add_argument("--model", default="minimind_26m")
    parser.add_argument("--tokenizer", default=str(SAMPLES / "tokenizer"), help="tokenizer folder for all trainers")
    parser.add_argument("--precision", default=",".join(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cases", help="only cases whose name contains one of these: ours+MiniMind")
    parser.add_argument(
        "--environments",
        default="own",
        choices=["own", "own+best"],
        help="own+best: each trainer also with its best thread setting",
    )
    parser.add_argument(
        "--summary", action="store_true", help="measure nothing; write the table over all stored machines"
    )
    parser.add_argument("--minimind", help="a checkout of github.com/jingyaogong/minimind")
    parser.add_argument("--litgpt", help="a checkout of github.com/Lightning-AI/litgpt")
    parser.add_argument("--nanochat", help="a checkout of github.com/karpathy/nanochat")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per case instead of a table")
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    main(parser.parse_args())
