"""doctor.py: what a resume would do with a run, and its repair by consent.

The plan and the comparisons are those of a resume, without torch and without a change.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Optional

from common.errors import UserError, did_you_mean_path, one_line, print_note, print_safely, resume_command
from common.hub import hub_name_of
from common.paths import outputs_dir
from common.settings import CheckedSettings, one_of, setting_values, settings_class
from runner.checkpoint.compatibility import (
    ENVIRONMENT,
    diff_facts,
    environment_facts,
    environment_without_torch,
    run_rules,
)
from runner.config.resolve import resolve_run
from runner.engine.config import Config
from runner.launch.doctor_checks import check_other_files
from runner.launch.initial_weights import restore_initial_weights
from runner.launch.recovery import CheckpointState, Problem, Severity, first_blocking, inspect_run, recover_run
from runner.launch.resume import naming_run, plan_resume
from runner.launch.run import check_inputs
from runner.run_dir.contents import (
    HYDRA_DIR,
    RUN_FILE,
    enclosing_run,
    find_runs,
    has_started,
    holds_run,
    is_sweep_dir,
    lacks_model,
)
from runner.run_dir.metadata import RunMetadata

TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)
UNKNOWN_WITHOUT_TORCH = "the data, and the number of threads and ranks, are compared when it starts"
GROUPED_FOLDERS = (f"{HYDRA_DIR}/", "tokenizer/")


@settings_class
class DoctorConfig(CheckedSettings):
    run: Optional[str]  # run directory, any path in it, a sweep (all of its jobs), or last
    all: bool  # every run in outputs/ instead of one
    # false: report only; true: repair what can be repaired; ask: after a question on the terminal
    repair: str = one_of("false", "true", "ask")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.all == (self.run is not None):
            raise UserError("give a run, or all=true", f"run={self.run} all={str(self.all).lower()}", "e.g. run=last")


class Verdict(StrEnum):
    CONTINUES = "continues"
    COMPLETE = "complete"
    REFUSES = "refuses"


@dataclass(frozen=True)
class ResumeOutcome:
    """What resume= would do.

    `step`: where it continues; `inexact`: why its bits may differ from an uninterrupted run.
    """

    verdict: Verdict
    text: str
    command: str
    step: int = 0
    inexact: Sequence[str] = ()


@dataclass(frozen=True)
class Examination:
    """The state of one run."""

    folder: Path
    problems: list[Problem]
    prediction: ResumeOutcome

    @property
    def is_sound(self) -> bool:
        is_damaged = any(problem.severity in (Severity.DAMAGED, Severity.BLOCKING) for problem in self.problems)
        return not is_damaged and self.prediction.verdict is not Verdict.REFUSES

    @property
    def repairs(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.repair]


def examine_run(folder: Path) -> Examination:
    """Return the state of every file of the run, and what resume= would do. Nothing is written."""
    state = CheckpointState(folder)
    try:
        problems = [*inspect_run(state), *check_other_files(state)]
    except UserError as error:  # a link, a pipe or a device: nothing further is opened
        file = error.setting.removeprefix(f"{folder}/")
        problems = [Problem(file, Severity.BLOCKING, error.message, error.fix)]
    return Examination(folder, problems, _predict_resume(state, problems))


def _predict_resume(state: CheckpointState, problems: list[Problem]) -> ResumeOutcome:
    """Return what `python runner/train.py resume=DIR` does with the run that has these problems."""
    if blocking := first_blocking(problems):
        text = f"refuses because of {blocking.file}: {blocking.state}"
        return ResumeOutcome(Verdict.REFUSES, text, blocking.consequence)
    restored = {problem.file: problem.content for problem in problems if problem.content is not None}
    fields = json.loads(restored[RUN_FILE]) if RUN_FILE in restored else RunMetadata.read(state.folder)
    try:
        config = _compose(state.folder, restored, has_started(fields))
        if fields.get("status") == "completed" and not lacks_model(state.folder, fields):
            text = f"prints that the run is complete at step {fields.get('step')}"
            longer = f"{resume_command(state.folder)} train.max_steps=N"
            return ResumeOutcome(Verdict.COMPLETE, text, longer, fields.get("step", 0))
        check_inputs(config)
        if config.init_from == "auto":
            config = replace(config, init_from=str(fields.get("init_from") or "scratch"))
        if hub_name_of(Path(config.init_from)) is None:  # others are fetched again
            restore_initial_weights(config)
        return _compare(state, config, has_started(fields))
    except UserError as error:
        return ResumeOutcome(Verdict.REFUSES, f"refuses: {error.message}", error.fix)


def _compose(folder: Path, restored: dict[str, bytes], started: bool) -> Config:
    """Return the config that a resume composes, from a copy of `.hydra/` with the files that it would restore."""
    with tempfile.TemporaryDirectory(prefix="settings-") as temp:
        copy = Path(temp).resolve()
        if (folder / HYDRA_DIR).is_dir():
            shutil.copytree(folder / HYDRA_DIR, copy / HYDRA_DIR, symlinks=True)
        for name, content in restored.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes(content)
        with naming_run(folder, copy):
            return plan_resume(copy, [], has_started=started).config


def _compare(state: CheckpointState, config: Config, started: bool) -> ResumeOutcome:
    command = resume_command(state.folder)
    if state.newest_whole is None:
        again = "starts again at step 0: there is no checkpoint yet"
        text = again if started else "starts the run, which has not begun to train"
        return ResumeOutcome(Verdict.CONTINUES, text, command)
    name, saved = state.newest_whole
    step = saved["progress"]["step"]
    if 0 < config.train.max_steps < step:
        text = f"refuses: the run is already at step {step}, and train.max_steps={config.train.max_steps}"
        return ResumeOutcome(Verdict.REFUSES, text, f"{command} train.max_steps={step}")
    facts = saved["compatibility"]
    config = replace(config, precision=config.precision.on("cpu", facts.get("precision.name")))
    differences = diff_facts(facts, current_facts(facts, config), run_rules(config))
    if differences["incompatible"]:
        text = f"refuses: another configuration saved {name}: {'; '.join(differences['incompatible'])}"
        return ResumeOutcome(Verdict.REFUSES, text, "restore the settings")
    inexact = differences["changes_rounding"]
    how = f"with exact: false because {'; '.join(inexact)}" if inexact else f"exactly ({UNKNOWN_WITHOUT_TORCH})"
    return ResumeOutcome(Verdict.CONTINUES, f"continues at step {step} {how}", command, step, inexact)


def torch_version() -> str | None:
    """Return `torch.__version__` without importing torch.

    The metadata of its wheel lack the build: 2.13.0 for 2.13.0+cu130.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with suppress(OSError):
        found = TORCH_VERSION.search(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
        return found[1] if found else None
    return None


def current_facts(saved: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the facts `saved` in a checkpoint with the values that they have now, as far as they can be known without
    torch and without the data.
    """
    now = environment_without_torch()
    if torch := torch_version():
        now["torch"] = torch
    kept = {fact: value for fact, value in saved.items() if not fact.startswith(f"{ENVIRONMENT}.variables.")}
    return {**kept, **setting_values(config), **environment_facts(now)}


def repair_run(folder: Path) -> list[str]:
    """Repair what can be repaired under the lock of the run; return what was done. run.json records it (`recovered`).

    Raises UserError, having changed nothing, if something is lost that nothing proves, or if another process trains
    there.
    """
    done: list[str] = []

    def recover(run_dir: Path) -> list[str]:
        problems = list(check_other_files(CheckpointState(run_dir), holds_lock=True))
        done.extend(recover_run(run_dir))
        for problem in problems:
            if problem.repair:
                problem.apply()
                done.append(f"{problem.file}: {problem.state}; {problem.repair}")
        return done

    RunMetadata.open(folder, resume=True, recover=recover).close()
    return done


def doctor(cfg: DoctorConfig) -> None:
    """Examine the runs that `cfg` names. Exits with 1 if one is damaged or cannot be resumed."""
    folders, sweep = _select_runs(cfg)
    examinations = []
    for folder in folders:
        examination = examine_run(folder)
        print_examination(examination, only_summary=len(folders) > 1 and examination.is_sound)
        if examination.repairs and _is_repair_wanted(cfg.repair, len(examination.repairs)):
            examination = _repair_and_examine(examination)
        examinations.append(examination)
    unsound = sum(not each.is_sound for each in examinations)
    if len(folders) > 1:
        print_safely(f"{len(folders)} runs, {unsound} of them damaged or not resumable")
    if sweep is not None:
        print_safely(
            f"sweep {one_line(str(sweep))}: {len(folders)} of its jobs have begun; resume= continues all that are not finished"
        )
        print_safely(f"  {one_line(resume_command(sweep))}")
    if unsound:
        raise SystemExit(1)


def _select_runs(cfg: DoctorConfig) -> tuple[list[Path], Path | None]:
    """Return the runs to examine, and the sweep if its jobs are meant."""
    if cfg.run is None:
        return sorted(find_runs(outputs_dir())), None
    path = resolve_run("last", "run") if cfg.run == "last" else Path(cfg.run).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{path} does not exist", f"run={cfg.run}", did_you_mean_path(cfg.run))
    if (folder := enclosing_run(path)) is None:
        raise UserError(
            f"{path} is not in a run directory: there is no run.json and no checkpoint",
            f"run={cfg.run}",
            "give a run directory, e.g. run=last",
        )
    if is_sweep_dir(folder):
        return sorted(job for job in folder.iterdir() if job.is_dir() and holds_run(job)), folder
    return [folder], None


def _is_repair_wanted(repair: str, count: int) -> bool:
    if repair == "ask" and not sys.stdin.isatty():
        print_note("repair=ask asks on a terminal only; repair=true repairs without a question")
        return False
    return repair == "true" or (
        repair == "ask" and input(f"repair {count} findings? [y/N] ").strip().lower() in ("y", "yes")
    )


def _repair_and_examine(examination: Examination) -> Examination:
    try:
        repair_run(examination.folder)  # prints each repair
    except UserError as error:
        print_safely(f"not repaired: {error.message}; {error.fix}")
        return examination
    after = examine_run(examination.folder)
    print_safely("")
    print_examination(after)
    return after


def print_examination(examination: Examination, only_summary: bool = False) -> None:
    """Print a line per file, what a problem means below it, and what resume= would do."""
    prediction = examination.prediction
    print_safely(f"run {one_line(str(examination.folder))}")
    shown = [] if only_summary else list(_group_sound(examination.problems))
    width = min(48, max((len(problem.file) for problem in shown), default=0))
    for problem in shown:
        print_safely(f"  {problem.severity:8} {one_line(problem.file):{width}}  {one_line(problem.state)}")
        if problem.consequence:
            repair = f"; repair=true: {problem.repair}" if problem.repair not in (None, problem.consequence) else ""
            print_safely(f"  {'':8} {'':{width}}  -> {one_line(problem.consequence + repair)}")
    print_safely(f"resume= {one_line(prediction.text)}\n  {one_line(prediction.command)}")


def _group_sound(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the problems with one line for all sound files of a folder of settings or of the tokenizer, first."""
    sound = [problem for problem in problems if problem.severity is Severity.SOUND]
    for folder in GROUPED_FOLDERS:
        if count := sum(problem.file.startswith(folder) for problem in sound):
            yield Problem(folder, Severity.SOUND, f"{count} files, whole")
    yield from (each for each in problems if each not in sound or not each.file.startswith(GROUPED_FOLDERS))
