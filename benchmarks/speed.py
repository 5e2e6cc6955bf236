"""Our step beside the machine's peak and beside other trainers: python benchmarks/speed.py [--path FILE] [--stage pretrain|sft] [--write].

All cases in one run, each in a process of its own, a step of each in turn, so that whatever disturbs the machine disturbs all of them; medians
over the rounds. The same model, data, tokenizer, lines and precision for all. Useful tokens are those that are no padding. Trainers that are not
installed (`pip install lm-runner[bench]`: Hugging Face's Trainer and TRL) or not given (--minimind CHECKOUT, --litgpt, --nanochat) are left out, and it says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.interleave import ROOT, Case, beside, measure, spec_of, speed, started, work
from lib.results import keep, tell

LINES, LENGTH = 4, 512
CLOCKS = ("seconds", "cpu")  # processor time tells of a busy machine nothing; with OMP_NUM_THREADS=1 no thread waits for another in it
CHECKOUTS = {"MiniMind's": "minimind", "litgpt,": "litgpt", "nanochat,": "nanochat"}
NEEDS = {"HF": ("transformers", "accelerate"), "TRL": ("transformers", "trl", "datasets")}
HEAD = (
    "| case | useful tokens/s | raw tokens/s | filled | share of peak | peak memory, MB | first step, s | useful, against the first | share of peak, processor time | useful, processor time |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def neutral_files(asked: argparse.Namespace, folder: str) -> dict[str, str]:
    """The rows as the other trainers read them: MiniMind's conversations, TRL's messages, or texts."""
    from data.schemas.schemas import ChatExample, detect_schema
    from data.sources.files import Source

    source, rows = Source.open(asked.path), "text" if asked.stage == "pretrain" else "chat"
    files = {name: str(Path(folder) / f"{name}.jsonl") for name in ("rows", "messages")}
    with open(files["rows"], "w", encoding="utf-8") as theirs, open(files["messages"], "w", encoding="utf-8") as messages:
        for place, row in source.rows():
            item = detect_schema(row, rows, source.where(place)).read(row, source.where(place))
            if isinstance(item, ChatExample):
                turns = [{"role": turn["role"], "content": turn["content"]} for turn in item.messages]
                print(json.dumps({"messages": turns}, ensure_ascii=False), file=messages)
                theirs_row: dict = {"conversations": [turn | dict.fromkeys(("reasoning_content", "tools", "tool_calls"), "") for turn in turns]}
            else:
                theirs_row = {"text": item.text}
                print(json.dumps(theirs_row, ensure_ascii=False), file=messages)
            print(json.dumps(theirs_row, ensure_ascii=False), file=theirs)
    return files


def why_not(name: str, asked: argparse.Namespace) -> str | None:
    """Why a case cannot be run here."""
    trainer = name.split()[0]
    if (flag := CHECKOUTS.get(trainer)) and not getattr(asked, flag):
        return f"no checkout given: --{flag} PATH"
    missing = [package for package in NEEDS.get(trainer, ()) if importlib.util.find_spec(package) is None]
    return f"{', '.join(missing)} not installed: pip install lm-runner[bench]" if missing else None


def found(cases: list[Case], precision: str) -> Iterator[dict[str, Any]]:
    """One line for each case."""
    mine = [case for case in cases if case.precision == precision]
    machine = next((case for case in mine if case.name == "machine"), None)
    trainers = [case for case in mine if case.name != "machine"] if machine else []  # without a peak there are no shares
    for case in trainers:
        shares = {clock: beside(work, case, machine, clock) for clock in CLOCKS}
        ratios = {clock: beside(speed, case, trainers[0], clock) for clock in CLOCKS}
        yield {
            "precision": precision,
            "case": case.name,
            "useful_tokens_per_second": case.median(speed) * case.filled,
            "raw_tokens_per_second": case.median(speed),
            "filled": case.filled,
            "share_of_peak": shares["seconds"],
            "peak_memory_mb": max(step["memory"] for step in case.steps),
            "first_step_seconds": case.first,
            "useful_against_first": ratios["seconds"] * case.filled / trainers[0].filled,
            "share_of_peak_cpu": shares["cpu"],
            "useful_against_first_cpu": ratios["cpu"] * case.filled / trainers[0].filled,
        }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        f"| {line['case']} | {line['useful_tokens_per_second']:,.0f} | {line['raw_tokens_per_second']:,.0f} | {line['filled']:.1%} | "
        f"{line['share_of_peak']:.1%} | {line['peak_memory_mb']:,.0f} | {line['first_step_seconds']:.1f} | "
        f"{line['useful_against_first']:.2f} | {line['share_of_peak_cpu']:.1%} | {line['useful_against_first_cpu']:.2f} |"
        for line in lines
    ]
    return "\n".join([HEAD, *rows])


def told(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What every case is told."""
    from data.tokenize.tokenizer import Tokenizer

    tokenizer = str(Path(asked.tokenizer).resolve())
    places = {name: str(Path(path).resolve()) for name in CHECKOUTS.values() if (path := getattr(asked, name))}
    words = [f"model={asked.model}", *asked.words]
    ours = spec_of(words, stage=asked.stage, path=asked.path, tokenizer=tokenizer, lines=LINES, length=LENGTH, folder=folder)
    return ours | places | {"tokenizer": tokenizer, "pad_id": Tokenizer.load(Path(tokenizer)).pad_id, "neutral": neutral_files(asked, folder)}


def chosen(asked: argparse.Namespace, spec: dict) -> tuple[list[tuple[str, dict]], list[str]]:
    """The cases that can run here, and what is said of the others."""
    from lib.cases import CASES, MORE

    wanted, said = list[tuple[str, dict]](), list[str]()
    if unknown := set(asked.precision.split(",")) - {"fp32", "bf16"}:
        raise SystemExit(f"--precision {','.join(unknown)}: there are fp32 and bf16")
    for precision in asked.precision.split(","):
        for name in CASES | MORE if asked.cases else CASES:
            if name != "machine" and asked.cases and not any(word in name for word in asked.cases.split("+")):
                continue
            if reason := why_not(name, asked):
                said.append(f"left out: {name}, {precision}: {reason}")
            else:
                wanted.append((name, spec | {"case": name, "precision": precision}))
    return wanted, said


def main(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted, left_out = chosen(asked, told(asked, folder))
        cases, failed = started(wanted)
        try:
            said = sorted({*left_out, *failed, *measure(cases, asked.rounds)})
        finally:
            for case in cases:
                case.close()
    lines = [line for precision in asked.precision.split(",") for line in found(cases, precision)]
    machine = {
        case.precision: {
            "gflops": case.median(work) / 1e9,
            "copy_gb_per_second": case.median(lambda step: step["copied"]) / 1e9,
        }
        for case in cases
        if case.name == "machine"
    }
    about = {
        "command": command_of(asked), "date": str(datetime.date.today()), "model": asked.model, "lines": LINES, "length": LENGTH, "rounds": asked.rounds,
        "cores": os.cpu_count(), "load": os.getloadavg()[0], "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
    }  # fmt: skip
    name = f"speed-{Path(asked.path).stem}-{asked.precision.replace(',', '-')}"
    if asked.json:
        found_text = "\n".join(json.dumps(line, ensure_ascii=False) for line in [about, {"machine": machine}, *lines, *({"said": line} for line in said)])
    else:
        parts = [
            f"{precision}, {LINES} x {LENGTH}; matrix product {machine[precision]['gflops']:,.0f} GFLOP/s, copy {machine[precision]['copy_gb_per_second']:.0f} GB/s:\n\n"
            f"{table([line for line in lines if line['precision'] == precision])}"
            for precision in machine
        ]
        found_text = "\n\n".join([*parts, *said])
    tell(name, f"A step of {asked.model} beside others, {asked.stage}", about["command"], found_text, asked.write and not asked.json)
    if asked.write:
        keep(name, about | {"machine": machine, "cases": lines, "said": said})


def command_of(asked: argparse.Namespace) -> str:
    """What anybody types to have this made again; where the checkouts lie is theirs to say."""
    flags = {"path": Path(asked.path).name, "stage": asked.stage, "model": asked.model, "precision": asked.precision, "rounds": asked.rounds}
    flags |= {"cases": f'"{asked.cases}"'} if asked.cases else {}
    flags |= {name: "CHECKOUT" for name in CHECKOUTS.values() if getattr(asked, name)}
    return " ".join(["python benchmarks/speed.py", *(f"--{name} {value}" for name, value in flags.items()), *asked.words])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default=str(ROOT / "data" / "samples" / "pretrain.jsonl"))
    parser.add_argument("--stage", default="pretrain", choices=["pretrain", "sft"])
    parser.add_argument("--model", default="minimind_26m")
    parser.add_argument("--tokenizer", default=str(ROOT / "data" / "samples" / "tokenizer"), help="folder of the tokenizer that all use")
    parser.add_argument("--precision", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cases", help="only those whose name holds one of these: ours+MiniMind")
    parser.add_argument("--minimind", help="a checkout of github.com/jingyaogong/minimind")
    parser.add_argument("--litgpt", help="a checkout of github.com/Lightning-AI/litgpt")
    parser.add_argument("--nanochat", help="a checkout of github.com/karpathy/nanochat")
    parser.add_argument("--json", action="store_true", help="one line for each case instead of a table")
    parser.add_argument("--write", action="store_true", help="keep table and numbers in benchmarks/results/")
    parser.add_argument("words", nargs="*", help="words of train.py on top")
    main(parser.parse_args())
