"""faults.py: inject the faults one after the other, print what came of each, and the table of all."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from common.errors import UserError, one_line, print_note, print_safely
from common.filesystem import write_json
from common.paths import command_line
from common.settings import check_at_least
from runner.fault_injection.rig import (
    FaultResult,
    Rig,
    Trial,
    UninterruptedRun,
    import_heavy_libraries,
    run_reference,
)
from runner.run_dir.contents import git_state, library_versions

FAULT_KINDS = ("kills", "disk", "flips", "signals", "workers")
FAULT_NAME = re.compile(f"({'|'.join(FAULT_KINDS)})-([1-9][0-9]*)")
LAUNCHES_PER_FAULT = 1.3  # undisturbed runs that a fault takes as long as
FORK_SECONDS, COLD_SECONDS = 0.5, 4.0  # of start-up, in each launch and in each real command
MAX_DRAWS = 3  # of a fault that comes after the end of the run
WORKERS = ["data.num_workers=2", "data.worker_timeout=3"]  # for the faults of data workers


@dataclass
class FaultsConfig:
    kills: int  # SIGKILL at random moments, every second one while a checkpoint is written; start-up included
    disk: int  # ENOSPC or EIO at random file calls in the run directory: once, five times, or from then on
    flips: int  # a file of a checkpoint with a flipped bit, cut short, or deleted
    # SIGTERM, SIGINT, SIGHUP and SIGUSR1 while it starts, tokenizes, steps, saves, evaluates, samples and ends, in turn
    signals: int
    workers: int  # data workers that are stopped (SIGSTOP) or killed
    # number of kills that hit the command as it is typed; the others a fork of this process, which has torch imported
    # already
    cold: int
    fault_seed: int  # of the moments, calls, bits and victims
    only: Optional[str]  # repeat one fault: its name in the output, e.g. kills-7; null: all of them
    folder: Optional[str]  # for the runs; null: a temporary one, which is kept if a promise was broken
    to: Optional[str]  # JSON file for the results; null: none
    acknowledge_within: float  # seconds within which a signal must be acknowledged
    timeout: float  # seconds after which a launch counts as hanging

    def __post_init__(self) -> None:
        for key in (*FAULT_KINDS, "cold", "fault_seed"):
            check_at_least(key, getattr(self, key), 0, 10)
        if self.timeout <= 0 or self.acknowledge_within <= 0:
            raise UserError(
                "timeout and acknowledge_within are seconds above 0",
                f"timeout={self.timeout} acknowledge_within={self.acknowledge_within}",
                "timeout=600 acknowledge_within=1",
            )
        if self.only is not None and not FAULT_NAME.fullmatch(self.only):
            raise UserError("only names one fault: KIND-NUMBER", f"only={self.only}", "e.g. only=kills-7")
        if not self.faults():
            raise UserError("there is no fault to inject", " ".join(f"{kind}=0" for kind in FAULT_KINDS), "kills=20")

    def is_cold(self, kind: str, number: int) -> bool:
        """Return whether a fault is injected into a real command instead of a fork."""
        return kind == "kills" and number <= self.cold

    def faults(self) -> list[tuple[str, int]]:
        """Return (kind, number) of the faults to inject."""
        if self.only is not None and (name := FAULT_NAME.fullmatch(self.only)):
            return [(name[1], int(name[2]))]
        return [(kind, number) for kind in FAULT_KINDS for number in range(1, getattr(self, kind) + 1)]


def run_faults(cfg: FaultsConfig, overrides: list[str]) -> None:
    """Inject the faults of `cfg` into `python runner/train.py *overrides`.

    Exits with 1 if a promise was broken.

    Raises UserError if the command does not complete undisturbed.
    """
    from runner.fault_injection.kinds import INJECT

    check_harness_overrides(overrides)
    faults, folder = cfg.faults(), make_folder(cfg)
    import_heavy_libraries()
    rig = Rig(overrides, folder, cfg.timeout)
    reference = run_reference(rig)
    with_workers = Rig([*overrides, *WORKERS], folder, cfg.timeout)
    if any(kind == "workers" for kind, _ in faults):
        worker_reference = run_reference(with_workers, "reference-workers")
    print_safely(
        f"undisturbed: {reference.seconds:.1f} s, {reference.step} steps, {reference.file_calls} file calls in the run directory"
    )
    print_safely(f"{len(faults)} faults, about {estimate(cfg, reference.seconds) / 60:.0f} min, in {folder}")
    results = []
    for kind, number in faults:
        of_kind, base = (with_workers, worker_reference) if kind == "workers" else (rig, reference)
        for draw in range(MAX_DRAWS):
            trial = Trial(of_kind, kind, number, cfg.fault_seed, draw, cfg.is_cold(kind, number))
            INJECT[kind](trial, base)
            complete(trial, base, cfg.acknowledge_within)
            if trial.result.injected or trial.result.broken:
                break
        print_result(trial.result)
        results.append(trial.result)
    report(cfg, overrides, results, folder)


def complete(trial: Trial, reference: UninterruptedRun, acknowledge_within: float) -> None:
    """Continue the run until it is complete, compare it, and remove it if no promise was broken."""
    result = trial.result
    trial.finish()
    trial.compare(reference)
    if result.acknowledged is not None and result.acknowledged > acknowledge_within:
        result.exits.append(f"acknowledged after {result.acknowledged:.1f} s")
    if not result.broken:
        shutil.rmtree(trial.folder, ignore_errors=True)


def check_harness_overrides(overrides: list[str]) -> None:
    """Raise UserError for settings that the harness needs for itself."""
    for override in overrides:
        if override.partition("=")[0] in ("resume", "hydra.run.dir", "data.cache"):
            raise UserError(
                "faults.py places the runs itself, in its own folder",
                override,
                "leave it out; folder=DIR places all of them",
            )


def make_folder(cfg: FaultsConfig) -> Path:
    if cfg.folder is None:
        return Path(tempfile.mkdtemp(prefix="faults-"))
    folder = Path(cfg.folder).expanduser().absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UserError("this folder is not empty", f"folder={cfg.folder}", "name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def estimate(cfg: FaultsConfig, seconds: float) -> float:
    """Return how long the faults will take (seconds), if an undisturbed run takes `seconds`."""
    each = LAUNCHES_PER_FAULT * (seconds + FORK_SECONDS)
    return each * len(cfg.faults()) + COLD_SECONDS * min(cfg.cold, cfg.kills)


def print_result(result: FaultResult) -> None:
    state = "BROKEN" if result.broken else "ok" if result.injected else "missed: the run was complete before"
    print_safely(
        f"{result.name:11} {one_line(result.fault)}: {state}, {result.seconds:.1f} s, exit codes {result.codes}"
    )
    for text in result.broken:
        print_safely(f"            {one_line(text)}")


def report(cfg: FaultsConfig, overrides: list[str], results: list[FaultResult], folder: Path) -> None:
    """Print the table and write the results. Raises SystemExit if a promise was broken."""
    broken = [result for result in results if result.broken]
    command = shlex.join(
        [
            *command_line("faults"),
            *(f"{kind}={getattr(cfg, kind)}" for kind in FAULT_KINDS),
            f"cold={cfg.cold}",
            f"fault_seed={cfg.fault_seed}",
            *overrides,
        ]
    )
    print_safely("\n" + fault_table(results))
    print_safely(f"\nthe same faults again: {command}")
    if cfg.to is not None:
        code = {"code": git_state(), "versions": library_versions()}
        records = [{"name": result.name, **asdict(result), "broken": result.broken} for result in results]
        write_json(Path(cfg.to).absolute(), {"command": command, **code, "faults": records})
    if broken:
        print_note(
            f"{len(broken)} of {len(results)} faults broke a promise; their runs are in {folder}; one of them again: only={broken[0].name}"
        )
        raise SystemExit(1)
    if cfg.folder is None:
        shutil.rmtree(folder, ignore_errors=True)


TABLE_COLUMNS: dict[str, Callable[[list[FaultResult]], str]] = {
    "injected": lambda results: f"{sum(result.injected for result in results)} of {len(results)}",
    "acknowledged within": lambda results: _seconds(
        [result.acknowledged for result in results if result.acknowledged is not None], "{:.2f} s"
    ),
    "resumed": lambda results: str(sum(len(result.codes) > 1 and not result.started_again for result in results)),
    "started again": lambda results: str(sum(result.started_again > 0 for result in results)),
    "needed a hand": lambda results: _count(results, "hand"),
    "different bits": lambda results: _count(results, "bits"),
    "tracebacks": lambda results: _count(results, "tracebacks"),
    "untrue exits": lambda results: _count(results, "exits"),
    "left behind": lambda results: _count(results, "leftovers"),
    "longest": lambda results: _seconds([result.seconds for result in results], "{:.1f} s"),
}


def fault_table(results: list[FaultResult]) -> str:
    """Return the table as text, also readable as Markdown."""
    rows = [["fault", *TABLE_COLUMNS], ["---", *["---:"] * len(TABLE_COLUMNS)]]
    for kind in FAULT_KINDS:
        if of_kind := [result for result in results if result.kind == kind]:
            rows.append([kind, *(column(of_kind) for column in TABLE_COLUMNS.values())])
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join(
        "| "
        + " | ".join(f"{cell:{'<' if index == 0 else '>'}{widths[index]}}" for index, cell in enumerate(row))
        + " |"
        for row in rows
    )


def _count(results: list[FaultResult], promise: str) -> str:
    """Return how many faults broke a promise."""
    return str(sum(bool(getattr(result, promise)) for result in results))


def _seconds(values: list[float], text: str) -> str:
    return text.format(max(values)) if values else ""
