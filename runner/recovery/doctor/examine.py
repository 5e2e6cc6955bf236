"""doctor.py: examine runs, print a page for each, repair by consent."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, did_you_mean_path, one_line, print_note, print_safely, resume_command
from common.paths import outputs_dir
from runner.recovery.doctor.checks import check_other_files
from runner.recovery.doctor.config import DoctorConfig
from runner.recovery.doctor.prediction import Prediction, Verdict, predict_resume
from runner.recovery.evidence import Evidence
from runner.recovery.finding import Finding, Repair, Severity
from runner.recovery.recover import inspect_run, recover_run
from runner.run_dir.contents.files import holds_run
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.naming import find_runs
from runner.run_dir.resolve import enclosing_run, is_sweep_dir, resolve_run

GROUPED_FOLDERS = (".hydra", "tokenizer")


@dataclass(frozen=True)
class Examination:
    """The state of one run."""

    folder: Path
    findings: list[Finding]
    prediction: Prediction

    @property
    def is_sound(self) -> bool:
        is_damaged = any(finding.severity in (Severity.DAMAGED, Severity.BLOCKING) for finding in self.findings)
        return not is_damaged and self.prediction.verdict is not Verdict.REFUSES

    @property
    def repairs(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.repair]


def examine_run(folder: Path) -> Examination:
    """Return the findings about every file of the run, and what resume= would do. Nothing is written."""
    evidence = Evidence(folder)
    try:
        findings = [*inspect_run(folder), *(repair.finding for repair in check_other_files(evidence))]
    except UserError as error:  # a link, a pipe or a device: nothing further is opened
        findings = [Finding(_relative(error.setting, folder), Severity.BLOCKING, error.message, error.fix)]
    return Examination(folder, findings, predict_resume(evidence, findings))


def _relative(path: str, folder: Path) -> str:
    return path.removeprefix(f"{folder}/")


def repair_run(folder: Path) -> list[str]:
    """Repair what can be repaired under the lock of the run; return what was done. run.json records it (`recovered`).

    Raises UserError, having changed nothing, if something is lost that nothing proves, or if another process trains there.
    """
    done: list[str] = []

    def recover(run_dir: Path) -> list[str]:
        others = [repair for repair in check_other_files(Evidence(run_dir), holds_lock=True) if repair.finding.repair]
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
        print_safely(f"{len(folders)} runs, {sum(not each.is_sound for each in examinations)} of them damaged or not resumable")
    if sweep is not None:
        print_safely(f"sweep {one_line(str(sweep))}: {len(folders)} of its jobs have begun; resume= continues all that are not finished")
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
        raise UserError(f"{path} is not in a run directory: there is no run.json and no checkpoint", f"run={cfg.run}", "give a run directory, e.g. run=last")
    if is_sweep_dir(folder):
        return sorted(job for job in folder.iterdir() if job.is_dir() and holds_run(job)), folder
    return [folder], None


def is_repair_wanted(repair: str, count: int) -> bool:
    if repair == "ask" and not sys.stdin.isatty():
        print_note("repair=ask asks on a terminal only; repair=true repairs without a question")
        return False
    return repair == "true" or (repair == "ask" and input(f"repair {count} findings? [y/N] ").strip().lower() in ("y", "yes"))


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
            repair = f"; repair=true: {finding.repair}" if finding.repair and finding.repair != finding.consequence else ""
            print_safely(f"  {'':8} {'':{width}}  -> {one_line(finding.consequence + repair)}")
    print_safely(f"resume= {one_line(prediction.text)}\n  {one_line(prediction.command)}")


def group_sound(findings: list[Finding]) -> list[Finding]:
    """Return the findings with one line for all sound files of a folder of settings or of the tokenizer."""
    grouped: list[Finding] = []
    for folder in GROUPED_FOLDERS:
        sound = [finding for finding in findings if finding.severity is Severity.SOUND and finding.file.startswith(f"{folder}/")]
        grouped += [Finding(f"{folder}/", Severity.SOUND, f"{len(sound)} files, whole")] if sound else []
        findings = [finding for finding in findings if finding not in sound]
    return [*grouped, *findings]
