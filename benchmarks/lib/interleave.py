"""Cases that take turns: each a process of its own (speed_cases.py) that makes steps when it is asked to, so that whatever disturbs the machine disturbs all."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


class Case:
    """A process that makes one turn, a step or several, whenever it is asked to. `spec` says which case of speed_cases.py it is."""

    def __init__(self, name: str, spec: dict) -> None:
        self.name, self.precision, self.steps, self.filled = name, spec["precision"], list[dict](), 1.0
        began = time.perf_counter()
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "speed_cases.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.failed = "error" in self.step()
        self.first = time.perf_counter() - began
        if not self.failed:
            self.failed = "error" in self.step()  # the second one still grows memory and caches
        if not self.failed:
            self.steps.clear()

    def ask(self, word: str) -> dict:
        assert self.process.stdin and self.process.stdout
        try:
            print(word, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": self.last_words()}

    def step(self) -> dict:
        self.steps.append(self.ask("step"))
        return self.steps[-1]

    def last_words(self) -> str:
        self.errors.seek(0)
        return next((line for line in reversed(self.errors.read().splitlines()) if line.strip()), "ended without a word")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def median(self, of: Any) -> float:
        return statistics.median(of(step) for step in self.steps)


def started(wanted: Iterable[tuple[str, dict]]) -> tuple[list[Case], list[str]]:
    """Cases past their first steps, and what is said of those that could not make them."""
    cases, said = list[Case](), list[str]()
    for name, spec in wanted:
        case = Case(name, spec)
        print(f"{name}, {case.precision}: first step after {case.first:.1f} s", file=sys.stderr)
        if case.failed:
            said.append(f"failed: {name}, {case.precision}: {case.steps[-1]['error']}")
            case.close()
        else:
            cases.append(case)
    return cases, said


def measure(cases: list[Case], rounds: int) -> list[str]:
    """So many turns of each. One that breaks down is closed and taken out of `cases`; returns what is said of it."""
    said = []
    for number in range(rounds):
        for case in list(cases):
            if error := case.step().get("error"):
                said.append(f"failed: {case.name}, {case.precision}: {error}")
                case.close()
                cases.remove(case)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    for case in cases:
        if case.name != "machine":
            counted = case.ask("fill")
            case.filled = counted["useful"] / counted["computed"]
    return said


def speed(step: dict, clock: str = "seconds") -> float:
    return step["computed"] / step[clock]


def work(step: dict, clock: str = "seconds") -> float:
    return step["flops"] / step[clock]


def beside(pace: Any, one: Case, other: Case, clock: str = "seconds") -> float:
    """Each round's ratio, and their median: what disturbs a round disturbs both."""
    return statistics.median(pace(mine, clock) / pace(its, clock) for mine, its in zip(one.steps, other.steps, strict=True))


def spec_of(words: list[str], *, stage: str, path: str, tokenizer: str, lines: int, length: int, folder: str) -> dict[str, Any]:
    """What a case of ours is told; its rows are prepared here, so that no first step pays for them."""
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.decoder import Decoder
    from runner.config.compose import compose_config
    from runner.engine.data_pipeline import build_data_pipeline

    words = [
        f"stage={stage}", "init_from=scratch", "data=own", f"data.path={Path(path).resolve()}", f"data.tokenizer={Path(tokenizer).resolve()}", "data.val_path=null",
        "data.val_fraction=0", f"data.max_length={length}", "data.num_workers=0", f"data.cache={folder}/cache", f"train.batch_size={lines}",
        "optimizer=adamw", "tracker.console=quiet", *words,
    ]  # fmt: skip
    config = compose_config(words)
    build_data_pipeline(config, Tokenizer.load(Path(tokenizer)))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(config.model).parameters())
    return {"words": words, "model": dataclasses.asdict(config.model), "parameters": parameters, "stage": stage, "lines": lines, "length": length}
