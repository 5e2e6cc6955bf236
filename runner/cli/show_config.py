"""`--cfg=job` and `--info` together with `resume=`: prints the config of the run as it would be resumed.

Nothing is written or locked.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from omegaconf import OmegaConf

from common.errors import UserError, print_note, strip_control
from runner.cli.hydra_app import run_hydra
from runner.config import snapshot
from runner.config.literals import hydra_quote
from runner.config.overrides import Flags, is_hydra_override
from runner.launch import resume
from runner.run_dir.contents import has_started
from runner.run_dir.metadata import RunMetadata
from runner.sweep import extend, grid
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepJob, SweepState


def show_run_config(folder: Path, extra: list[str], flags: Flags) -> None:
    """Print what the flags ask for, of the run in `folder` with the overrides `extra`."""
    plan = resume.plan_resume(folder, extra)
    resume.print_notes(plan)
    kind = flags.get("--cfg")
    if kind is None:
        with snapshot.as_config_dir(folder) as conf:
            return run_hydra([*plan.overrides, f"hydra.run.dir={hydra_quote(str(folder))}"], flags, conf)
    if kind != "job":
        raise UserError("a resumed run has no settings of Hydra", f"--cfg {kind}", "--cfg=job prints its settings")
    package = flags.get("--package")
    section = OmegaConf.select(plan.tree, package) if package else plan.tree
    text = OmegaConf.to_yaml(section, resolve=True) if OmegaConf.is_config(section) else section
    print(strip_control(str(text)), end="")


def show_sweep_config(folder: Path, extra: list[str], flags: Flags) -> None:
    """Print it of the job that `resume=folder` would run next, or of the job with the values of swept keys in `extra`."""
    state = SweepState.open_readonly(folder)
    with snapshot.as_config_dir(folder) as conf:
        additions = extend.parse_additions(state, extra, conf)
        state.overrides = grid.merge_overrides(state.overrides, additions.shared)
        job = _select_job(state, {key: values[0] for key, values in additions.swept.items()})
        print_note(f"resume: one job of this sweep: {job.name}{_suggest_other_job(state, job)}")
        session, run_dir = SweepSession(state, conf), folder / job.name
        if has_started(RunMetadata.read(run_dir)):
            return show_run_config(run_dir, extend.pending_overrides(session, job, additions.training), flags)
        run_hydra([*session.job_overrides(job), f"hydra.run.dir={hydra_quote(str(run_dir))}"], flags, conf)


def _select_job(state: SweepState, values: dict[str, str]) -> SweepJob:
    """Return the first job that is not completed, otherwise the first, with these values of swept keys."""
    job = next((job for job in state.jobs if job.needs_run), state.jobs[0] if state.jobs else None)
    if job is None:
        shared = shlex.join(override for override in state.overrides if not is_hydra_override(override))
        raise UserError(
            "the sampler has drawn no job of this sweep yet",
            f"resume={state.folder}",
            f"what all jobs share: python runner/train.py {shared} --cfg job",
        )
    return state.add_job(job.overrides | values)


def _suggest_other_job(state: SweepState, job: SweepJob) -> str:
    name = next(
        (other.name for other in state.jobs if other is not job and RunMetadata.read(state.folder / other.name)), None
    )
    return f"; another: {shlex.quote(f'resume={state.folder / name}')}" if name else ""
