"""doctor.py: what a resume would do with a run, and its repair by consent.

The plan and the comparisons are those of a resume, without torch and without a change.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, Optional

from common.errors import UserError, did_you_mean_path, one_line, print_note, print_safely, resume_command
from common.paths import outputs_dir
from common.settings import check_choice, setting_values
from runner.checkpoint.compatibility import (
    CODE,
    ENVIRONMENT,
    code_fingerprint,
    cpu_model,
    diff_facts,
    environment_facts,
    numeric_variables,
    run_rules,
)
from runner.config.resolve import resolve_run
from runner.engine.config import Config
from runner.launch.resume import plan_resume
from runner.launch.run import check_inputs
from runner.recovery.doctor.checks import check_other_files
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity
from runner.recovery.recover import inspect_run, recover_run
from runner.run_dir.contents import RUN_FILE, enclosing_run, find_runs, has_started, holds_run, is_sweep_dir
from runner.run_dir.metadata import RunMetadata


@dataclass
class DoctorConfig:
    run: Optional[str]  # run directory, any path in it, a sweep (all of its jobs), or last
    all: bool  # every run in outputs/ instead of one
    repair: str  # false: report only; true: repair what can be repaired; ask: after a question on the terminal

    def __post_init__(self) -> None:
        check_choice("repair", self.repair, ("false", "true", "ask"))
        if self.all == (self.run is not None):
            raise UserError("give a run, or all=true", f"run={self.run} all={str(self.all).lower()}", "e.g. run=last")


TORCH_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)
UNKNOWN_WITHOUT_TORCH = "the data, and the number of threads and ranks, are compared when it starts"


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


def predict_resume(evidence: CheckpointState, findings: list[Problem]) -> ResumeOutcome:
    """Return what `python runner/train.py resume=DIR` does with the run, whose findings are given."""
    folder = evidence.folder
    command = resume_command(folder)
    if blocking := next((finding for finding in findings if finding.severity is Severity.BLOCKING), None):
        return ResumeOutcome(
            Verdict.REFUSES, f"refuses because of {blocking.file}: {blocking.state}", blocking.consequence
        )
    is_restored = any(finding.file == RUN_FILE and finding.severity is Severity.DAMAGED for finding in findings)
    fields: dict[str, Any] = {"status": "interrupted", "attempt": 1} if is_restored else RunMetadata.read(folder)
    try:
        config = _compose(evidence, has_started(fields))
        if fields.get("status") == "completed":
            return ResumeOutcome(
                Verdict.COMPLETE,
                f"prints that the run is complete at step {fields.get('step')}",
                f"{command} train.max_steps=N",
                fields.get("step", 0),
            )
        check_inputs(config)
        return _compare(evidence, config, fields, command)
    except UserError as error:
        return ResumeOutcome(Verdict.REFUSES, f"refuses: {error.message}", error.fix)


def _compose(evidence: CheckpointState, started: bool) -> Config:
    """Return the config that a resume composes, with the damaged files of `.hydra/` as it would restore them."""
    with _restored_settings(evidence) as folder:
        try:
            return plan_resume(folder, [], has_started=started).config
        except UserError as error:
            texts = [
                text.replace(str(folder), str(evidence.folder)) for text in (error.message, error.setting, error.fix)
            ]
            raise UserError(*texts) from error


@contextmanager
def _restored_settings(evidence: CheckpointState) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="settings-") as temp:
        folder = Path(temp).resolve()
        if (evidence.folder / ".hydra").is_dir():
            shutil.copytree(evidence.folder / ".hydra", folder / ".hydra", symlinks=True)
        from runner.recovery.settings_files import damage_of

        for name, text in evidence.record["files"].items():
            if damage_of(folder / name, text, name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _compare(evidence: CheckpointState, config: Config, fields: dict[str, Any], command: str) -> ResumeOutcome:
    if evidence.newest_whole is None:
        begins = (
            "starts again at step 0: there is no checkpoint yet"
            if has_started(fields)
            else "starts the run, which has not begun to train"
        )
        return ResumeOutcome(Verdict.CONTINUES, begins, command)
    name, state = evidence.newest_whole
    step = state["progress"]["step"]
    if 0 < config.train.max_steps < step:
        text = f"refuses: the run is already at step {step}, and train.max_steps={config.train.max_steps}"
        return ResumeOutcome(Verdict.REFUSES, text, f"{command} train.max_steps={step}")
    differences = diff_facts(state["compatibility"], current_facts(state["compatibility"], config), run_rules(config))
    if differences["incompatible"]:
        return ResumeOutcome(
            Verdict.REFUSES,
            f"refuses: another configuration saved {name}: {'; '.join(differences['incompatible'])}",
            "restore the settings",
        )
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
    now = {"python": platform.python_version(), "code": code_fingerprint(), "cpu_model": cpu_model()}
    with suppress(metadata.PackageNotFoundError):
        now["numpy"] = metadata.version("numpy")
    if torch := torch_version():
        now["torch"] = torch
    now |= {f"variables.{name}": value for name, value in numeric_variables(os.environ).items()}
    kept = {fact: value for fact, value in saved.items() if not fact.startswith(f"{ENVIRONMENT}.variables.")}
    known = environment_facts(now)
    if CODE not in saved:  # of an earlier version, which recorded less
        known = {fact: value for fact, value in known.items() if fact in saved or fact == CODE}
    return {**kept, **setting_values(config), **known}


GROUPED_FOLDERS = (".hydra", "tokenizer")


@dataclass(frozen=True)
class Examination:
    """The state of one run."""

    folder: Path
    findings: list[Problem]
    prediction: ResumeOutcome

    @property
    def is_sound(self) -> bool:
        is_damaged = any(finding.severity in (Severity.DAMAGED, Severity.BLOCKING) for finding in self.findings)
        return not is_damaged and self.prediction.verdict is not Verdict.REFUSES

    @property
    def repairs(self) -> list[Problem]:
        return [finding for finding in self.findings if finding.repair]


def examine_run(folder: Path) -> Examination:
    """Return the findings about every file of the run, and what resume= would do. Nothing is written."""
    evidence = CheckpointState(folder)
    try:
        findings = [*inspect_run(folder), *(repair.finding for repair in check_other_files(evidence))]
    except UserError as error:  # a link, a pipe or a device: nothing further is opened
        findings = [Problem(_relative(error.setting, folder), Severity.BLOCKING, error.message, error.fix)]
    return Examination(folder, findings, predict_resume(evidence, findings))


def _relative(path: str, folder: Path) -> str:
    return path.removeprefix(f"{folder}/")


def repair_run(folder: Path) -> list[str]:
    """Repair what can be repaired under the lock of the run; return what was done. run.json records it (`recovered`).

    Raises UserError, having changed nothing, if something is lost that nothing proves, or if another process trains
    there.
    """
    done: list[str] = []

    def recover(run_dir: Path) -> list[str]:
        others = [
            repair for repair in check_other_files(CheckpointState(run_dir), holds_lock=True) if repair.finding.repair
        ]
        done.extend(recover_run(run_dir))
        for repair in others:
            repair.apply()
            done.append(_describe(repair))
        return done

    RunMetadata.open(folder, resume=True, recover=recover).close()
    return done


def _describe(repair: Repair) -> str:
    return f"{repair.finding.file}: {repair.finding.state}; {repair.finding.repair}"


def doctor(cfg: DoctorConfig) -> None:
    """Examine the runs that `cfg` names. Exits with 1 if one is damaged or cannot be resumed."""
    folders, sweep = select_runs(cfg)
    examinations = []
    for folder in folders:
        examination = examine_run(folder)
        print_examination(examination, only_summary=len(folders) > 1 and examination.is_sound)
        if examination.repairs and is_repair_wanted(cfg.repair, len(examination.repairs)):
            examination = repair_and_examine(examination)
        examinations.append(examination)
    if len(folders) > 1:
        print_safely(
            f"{len(folders)} runs, {sum(not each.is_sound for each in examinations)} of them damaged or not resumable"
        )
    if sweep is not None:
        print_safely(
            f"sweep {one_line(str(sweep))}: {len(folders)} of its jobs have begun; resume= continues all that are not finished"
        )
        print_safely(f"  {one_line(resume_command(sweep))}")
    if not all(each.is_sound for each in examinations):
        raise SystemExit(1)


def select_runs(cfg: DoctorConfig) -> tuple[list[Path], Path | None]:
    """Return the runs to examine, and the sweep if its jobs are meant."""
    if cfg.run is None:
        return sorted(find_runs(outputs_dir())), None
    path = resolve_run("last", "run") if cfg.run == "last" else Path(cfg.run).expanduser().absolute()
    if not path.exists():
        raise UserError(f"{path} does not exist", f"run={cfg.run}", did_you_mean_path(cfg.run))
    folder = path if holds_run(path) else enclosing_run(path)
    if folder is None:
        raise UserError(
            f"{path} is not in a run directory: there is no run.json and no checkpoint",
            f"run={cfg.run}",
            "give a run directory, e.g. run=last",
        )
    if is_sweep_dir(folder):
        return sorted(job for job in folder.iterdir() if job.is_dir() and holds_run(job)), folder
    return [folder], None


def is_repair_wanted(repair: str, count: int) -> bool:
    if repair == "ask" and not sys.stdin.isatty():
        print_note("repair=ask asks on a terminal only; repair=true repairs without a question")
        return False
    return repair == "true" or (
        repair == "ask" and input(f"repair {count} findings? [y/N] ").strip().lower() in ("y", "yes")
    )


def repair_and_examine(examination: Examination) -> Examination:
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
    """Print a line per file, what a finding means below it, and what resume= would do."""
    prediction = examination.prediction
    print_safely(f"run {one_line(str(examination.folder))}")
    shown = [] if only_summary else group_sound(examination.findings)
    width = min(48, max((len(finding.file) for finding in shown), default=0))
    for finding in shown:
        print_safely(f"  {finding.severity:8} {one_line(finding.file):{width}}  {one_line(finding.state)}")
        if finding.consequence and finding.severity is not Severity.SOUND:
            repair = (
                f"; repair=true: {finding.repair}" if finding.repair and finding.repair != finding.consequence else ""
            )
            print_safely(f"  {'':8} {'':{width}}  -> {one_line(finding.consequence + repair)}")
    print_safely(f"resume= {one_line(prediction.text)}\n  {one_line(prediction.command)}")


def group_sound(findings: list[Problem]) -> list[Problem]:
    """Return the findings with one line for all sound files of a folder of settings or of the tokenizer."""
    grouped: list[Problem] = []
    for folder in GROUPED_FOLDERS:
        sound = [
            finding
            for finding in findings
            if finding.severity is Severity.SOUND and finding.file.startswith(f"{folder}/")
        ]
        grouped += [Problem(f"{folder}/", Severity.SOUND, f"{len(sound)} files, whole")] if sound else []
        findings = [finding for finding in findings if finding not in sound]
    return [*grouped, *findings]
