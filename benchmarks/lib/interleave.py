"""Cases that take turns, each in a process of its own (case_process.py), so that other load on the machine affects all
of them.

A process is stopped while it waits for its turn: its OpenMP threads, which may spin for as long as they wait, and its
other threads take no core.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib import CHECKOUT_VARIABLE, ROOT
from lib.environment import OWN, thread_settings, with_setting
from lib.runs import compose_run

ENVIRONMENT = dict(os.environ)  # of the user: modules that are imported later may add variables
# of a setting against the best before it: number of turns, and relative speed from which it is better
TRIAL_TURNS, MIN_GAIN = 5, 1.01
Step = dict[str, Any]  # one turn, as cases.Gate sends it


class CaseProcess:
    """A process that does one turn, of one or more steps, per request.

    `spec["case"]` names the case; `variables`: of its setting, None for OWN.

    `spec["checkout"]`, if it is there: the folder of another checkout whose packages the process imports.
    `spec["variables"]`: added to its environment.
    """

    def __init__(self, name: str, spec: dict, setting: str = OWN, variables: dict[str, str] | None = None) -> None:
        self.steps_per_turn = spec.get("steps_per_turn", 1)
        self.name, self.precision, self.steps, self.fill_ratio = name, spec["precision"], list[Step](), 1.0
        self.profile = dict[str, Any]()  # see cases.Gate.profiled
        self.first_steps = list[Step]()  # not among `steps`: they compile and fill caches
        self.setting, self.facts = setting, dict[str, Any]()
        started = time.perf_counter()
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lib.case_process", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=with_setting(ENVIRONMENT, variables)
            | spec.get("variables", {})
            | import_variables(spec.get("checkout")),
            cwd=spec.get("checkout"),  # the first folder from which `python -m` imports
            process_group=0,  # the kernel ends a group with a stopped process when the parent dies
        )
        self.failed = "error" in self.step()
        self.first_step_seconds = time.perf_counter() - started
        if not self.failed:
            self.failed = "error" in self.step()  # the second step still grows memory and caches
        if not self.failed:
            self.facts = self.request("environment")
            self.first_steps, self.steps = self.steps, []
        if (
            not self.failed
            and "checkout" in spec
            and (folders := self.request("code")["folders"]) != [spec["checkout"]]
        ):
            self.failed = True
            self.steps.append({"error": f"the process has imported {', '.join(folders)} instead of {spec['checkout']}"})

    def request(self, kind: str) -> dict:
        assert self.process.stdin and self.process.stdout
        self._signal(signal.SIGCONT)
        try:
            print(kind, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        self._signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):  # macOS: since Python 3.13
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return json.loads(line) if line else {"error": self.last_error_line()}

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            # not its group: a subprocess that is stopped before it executes its program holds up its parent
            os.kill(self.process.pid, number)

    def step(self) -> Step:
        self.steps.append(self.request("step"))
        return self.steps[-1]

    def last_error_line(self) -> str:
        self.errors.seek(0)
        return next(
            (line for line in reversed(self.errors.read().splitlines()) if line.strip()), "ended without a message"
        )

    def close(self) -> None:
        assert self.process.stdin
        if self.process.returncode is None:
            self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def median(self, value: Callable[[Step], float]) -> float:
        return statistics.median(value(step) for step in self.steps)


def import_variables(checkout: str | None) -> dict[str, str]:
    """Return the variables with which a process imports the packages of `checkout`, None: of this one, and the
    benchmarks of this one.
    """
    first = [] if checkout is None else [checkout]
    variables = {
        "PYTHONPATH": os.pathsep.join(
            [*first, str(ROOT / "benchmarks"), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])]
        )
    }
    return variables if checkout is None else variables | {CHECKOUT_VARIABLE: checkout}


def start_cases(
    specs: Iterable[tuple[str, dict]], with_best: bool, started: list[CaseProcess]
) -> tuple[list[CaseProcess], list[str]]:
    """Return the cases after their first steps, and a message per case that failed.

    Every process is added to `started`.

    `with_best`: a case is followed by itself with the best thread setting, where that is better than OWN.
    """

    def start(name: str, spec: dict, setting: str = OWN, variables: dict[str, str] | None = None) -> CaseProcess:
        case = CaseProcess(name, spec, setting, variables)
        started.append(case)
        print(f"{name}, {case.precision}, {setting}: first step after {case.first_step_seconds:.1f} s", file=sys.stderr)
        if case.failed:
            messages.append(f"failed: {name}, {case.precision}, {setting}: {case.steps[-1]['error']}")
            case.close()
        return case

    cases, messages = list[CaseProcess](), list[str]()
    for name, spec in specs:
        own = best = start(name, spec)
        if own.failed:
            continue
        cases.append(own)
        for setting, variables in thread_settings(ENVIRONMENT).items() if with_best and name != "machine" else ():
            if not (challenger := start(name, spec, setting, variables)).failed:
                worse, best = (best, challenger) if is_better(challenger, best) else (challenger, best)
                if worse is not own:
                    worse.close()
        cases += [best] * (best is not own)
    return cases, messages


def is_better(challenger: CaseProcess, best: CaseProcess) -> bool:
    """Let both take turns; return whether the first is faster. Their steps are forgotten."""
    is_complete = not any("error" in case.step() for _ in range(TRIAL_TURNS) for case in (best, challenger))
    gain = ratio(tokens_per_second, challenger, best) if is_complete else 0.0
    print(
        f"{challenger.name}, {challenger.precision}, {challenger.setting}: {gain:.3f} times the speed of {best.setting}",
        file=sys.stderr,
    )
    challenger.steps.clear()
    best.steps.clear()
    return gain > MIN_GAIN


def run_rounds(
    cases: list[CaseProcess],
    rounds: int,
    after_round: Callable[[list[CaseProcess]], None] = lambda cases: None,
    deadline: float = math.inf,
) -> list[str]:
    """Run one turn of each case per round, and no round after the first that begins later than `deadline` (of
    time.monotonic).

    A case that fails is closed and removed from `cases`; returns a message for each.
    """
    messages = []
    for case in cases:
        if case.name != "machine":
            counts = case.request("padding")
            case.fill_ratio = counts["useful"] / counts["computed"]
    for number in range(rounds):
        if number and time.monotonic() > deadline:
            messages.append(f"{number} of {rounds} rounds: the time was over")
            break
        for case in list(cases):
            if error := case.step().get("error"):
                messages.append(f"failed: {case.name}, {case.precision}: {error}")
                case.close()
                cases.remove(case)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        after_round(cases)
    return messages


def measure(
    specs: Iterable[tuple[str, dict]], rounds: int, with_best: bool = False, profiles: bool = False, **options: Any
) -> tuple[list[CaseProcess], list[str]]:
    """Start the cases, run all rounds (`options`: of `run_rounds`) and end their processes; return the cases that did
    not fail, and the messages of the others.

    `profiles`: one more turn of each fills `CaseProcess.profile`.
    """
    started = list[CaseProcess]()
    try:
        cases, messages = start_cases(specs, with_best, started)
        messages += run_rounds(cases, rounds, **options)
        for case in cases if profiles else ():
            case.profile = case.request("profile") if case.name != "machine" else {}
            messages += [f"no profile: {case.name}: {error}"] if (error := case.profile.get("error")) else []
    finally:
        for case in started:
            case.close()
    return cases, messages


def tokens_per_second(step: Step, clock: str = "seconds") -> float:
    return step["computed"] / step[clock]


def flops_per_second(step: Step, clock: str = "seconds") -> float:
    return step["flops"] / step[clock]


def round_ratios(
    value: Callable[[Step, str], float], case: CaseProcess, other: CaseProcess, clock: str = "seconds"
) -> list[float]:
    return [value(mine, clock) / value(others, clock) for mine, others in zip(case.steps, other.steps, strict=True)]


def ratio(value: Callable[[Step, str], float], case: CaseProcess, other: CaseProcess, clock: str = "seconds") -> float:
    """Return the median of the ratios of each round: other load in a round affects both."""
    return statistics.median(round_ratios(value, case, other, clock))


def case_spec(
    overrides: list[str],
    *,
    stage: str,
    path: str,
    tokenizer: str,
    rows: int,
    length: int,
    folder: str,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """Return the spec of the cases.

    Rows are tokenized here, so that no first step contains it. `rows` per step, `length` tokens per row.

    Its file `tokens` has all rows concatenated: other trainers cut sequences of equal length from it, in processes that
    import none of our code.
    """
    import numpy as np
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.language_model import create_model
    from runner.engine.data_pipeline import build_data_pipeline

    overrides = [
        f"stage={stage}", "init_from=scratch", "data=own", f"data.path={Path(path).resolve()}", f"data.tokenizer={Path(tokenizer).resolve()}", "data.val_path=null",
        "data.val_fraction=0", f"data.max_length={length}", "data.num_workers=0", f"data.cache={folder}/cache", f"train.batch_size={rows}",
        f"optimizer={optimizer}", "tracker.console=quiet", *overrides,
    ]  # fmt: skip
    config = compose_run(overrides)
    build_data_pipeline(config, Tokenizer.load(Path(tokenizer)))
    unpacked = compose_run([*overrides, "data.packing=none", "data.too_long=auto"])
    rows_of_file = build_data_pipeline(unpacked, Tokenizer.load(Path(tokenizer))).train
    ids = np.concatenate(
        [
            sequence.ids
            for index in range(len(rows_of_file))
            for row in rows_of_file[index]
            for sequence in row.sequences[:1]
        ]
    )
    np.save(f"{folder}/tokens.npy", ids)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in create_model(config.model).parameters())
    spec = {
        "overrides": overrides,
        "model": dataclasses.asdict(config.model),
        "parameters": parameters,
        "stage": stage,
        "rows": rows,
        "length": length,
    }
    return spec | {"tokens": f"{folder}/tokens.npy"}


def shortest_times(runs: Mapping[str, Callable[[], object]], turns: int, passes: int) -> dict[str, float]:
    """Return name -> the shortest time of a call, seconds; those that raise KernelsUnavailableError are left out.

    They take turns of `passes` calls after one that is not counted: oneDNN keeps the programs of the last few products
    only.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    times: dict[str, list[float]] = {}
    for name in [*runs] * turns:
        with suppress(KernelsUnavailableError):
            runs[name]()
            for _ in range(passes):
                started = time.perf_counter()
                runs[name]()
                times.setdefault(name, []).append(time.perf_counter() - started)
    return {name: min(each) for name, each in times.items()}
