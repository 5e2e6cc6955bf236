"""`--cfg job` and `--info` of a sweep: of the job that resume= would run next. Nothing is written, and no lock is taken."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from runner.config.compose import register_configs
from runner.config.overrides import hydra_quote
from runner.run_dir import config_snapshot, resume
from runner.run_dir.metadata import has_started, read_run_metadata
from runner.sweep import command, grid
from runner.sweep.session import SweepSession, needs_run
from runner.sweep.state import SweepJob, SweepState
from runner.sweep.validation import HYDRA_PREFIXES


def show_sweep_config(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """The words of one job, with what the extra words would change in it; values of swept words choose the job."""
    state = SweepState.open_readonly(folder)
    with config_snapshot.as_config_dir(folder) as conf:
        more, added = command.parse_additions(state, extra, conf)
        plain = [word for word in more if not word.startswith(HYDRA_PREFIXES)]
        state.fields["overrides"] = grid.merge_overrides(state.fields["overrides"], more)
        job = _select_job(state, {key: values[0] for key, values in added.items()})
        print(f"resume: one job of this sweep: {job['name']}{_suggest_other_job(state, job)}", file=sys.stderr)
        found, run = SweepSession(state, conf), folder / job["name"]
        if has_started(read_run_metadata(run)):
            plan = resume.plan_resume(run, command.pending_overrides(found, job, plain))
            resume.print_notes(plan)
            return resume.show_resumed_config(plan, flags, app)
        register_configs()
        sys.argv[1:] = [*flags, "--config-path", str(conf), *found.job_overrides(job), f"hydra.run.dir={hydra_quote(str(run))}"]
        app()


def _select_job(state: SweepState, values: dict[str, str]) -> SweepJob:
    """The first that is not finished, or else the first; with these values of swept words."""
    job = next(filter(needs_run, state.jobs), state.jobs[0] if state.jobs else None)
    if job is None:
        words = shlex.join(word for word in state.fields["overrides"] if not word.startswith(HYDRA_PREFIXES))
        raise UserError(
            "no job of this sweep has been chosen yet", f"resume={state.folder}", f"look at what they share: python runner/train.py {words} --cfg job"
        )
    return state.add(job["overrides"] | values)


def _suggest_other_job(state: SweepState, job: SweepJob) -> str:
    name = next((other["name"] for other in state.jobs if other is not job and read_run_metadata(state.folder / other["name"])), None)
    return f"; another: {shlex.quote(f'resume={state.folder / name}')}" if name else ""
