"""Start a sweep with --multirun, or resume one.

Hydra composes it and calls the sweeper plugin, which calls `run_sweep`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, read_write

from common import paths
from common.errors import print_note
from runner.config import snapshot
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.literals import hydra_quote
from runner.config.overrides import is_hydra_override
from runner.launch import torchrun
from runner.run_dir import contents
from runner.sweep import extend, validation
from runner.sweep.backends.base import Backend
from runner.sweep.grid import PointComposer, SweeperOptions, merge_overrides
from runner.sweep.scheduler import SweepScheduler
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepState

MULTIRUN_FLAGS = ("--multirun", "-m")

RunHydra = Callable[..., Any]  # run_hydra(overrides, flags, config_dir=None): run Hydra once with these arguments


def start_sweep(overrides: list[str], flags: list[str], run_hydra: RunHydra) -> None:
    """Start the sweep of `overrides`, as typed; `flags` hold --multirun.

    Exits with 75 or 1 unless all jobs complete.
    """
    validation.check_hydra_overrides(overrides)
    with translating_hydra_errors(overrides):
        run_hydra(overrides, flags)


def resume_sweep(folder: Path, overrides: list[str], flags: list[str], run_hydra: RunHydra) -> None:
    """Run the jobs of the sweep in `folder` that are not completed, and what the typed `overrides` add to it."""
    with snapshot.as_config_dir(folder) as conf:
        with SweepState.open(folder) as state:
            additions = extend.parse_additions(state, overrides, conf)
            is_complete = state.sweeper == "grid" and not any(job.needs_run for job in state.jobs)
            if is_complete and not additions:
                return SweepSession(state).finish(stopped=False)
            changed_files = snapshot.changed_files(folder)
            for line in changed_files:
                print_note(f"resume: {line}")
            if additions:
                extend.apply_additions(state, additions, conf)
                state.write()
        hydra_overrides = [override for override in additions.shared if is_hydra_override(override)]
        stored = merge_overrides(state.overrides, hydra_overrides)
        swept = [f"{key}={','.join(values)}" for key, values in state.swept.items()]
        launch = [validation.SWEEP_DIR_KEY + hydra_quote(str(folder)), "hydra.sweeper.resume=true"]
        other_flags = [flag for flag in flags if flag not in MULTIRUN_FLAGS]
        # from the copy in the sweep where conf/ has changed: a swept option may be gone from conf/
        with translating_hydra_errors(overrides):
            run_hydra([*stored, *swept, *launch], ["--multirun", *other_flags], conf if changed_files else None)


def run_sweep(config: DictConfig, overrides: list[str]) -> None:
    """Create the sweep that Hydra has composed (`config`, with the typed `overrides`), or open the one to resume; run
    its jobs.

    Everything is checked before the sweep directory exists; sweep.json with all its jobs is written before the first of
    them starts.
    """
    sweeper, backend = validation.hydra_options(config)
    if sweeper.resume:
        state, composer = SweepState.open(Path(config.hydra.sweep.dir).absolute()), None
    else:
        state, composer = _create_state(config, overrides, sweeper, backend)
    with state, snapshot.as_config_dir(state.folder) as conf:
        session = SweepSession(state, conf, composer, config)
        for job in state.jobs if not sweeper.resume else ():
            session.derived_overrides(job)  # init_from=auto is resolved before the first job
        torchrun.set_restart_dir(state.folder)
        state.set_status("running")
        text = f"{f'{len(state.jobs)} jobs' if state.jobs else 'jobs of the sampler'} -> {state.folder}"
        session.lines.start(text, {"folder": str(state.folder), "jobs": len(state.jobs)})
        if not sweeper.resume:  # a resumed one may have much to read: its first job starts before
            session.page.write()
        try:
            with closing(backend), closing(sweeper.search(state)) as search:
                is_stopped = SweepScheduler(session, backend, search).run()
        except KeyboardInterrupt:
            is_stopped = True
        session.finish(is_stopped)


def _create_state(
    config: DictConfig, overrides: list[str], sweeper: SweeperOptions, backend: Backend
) -> tuple[SweepState, PointComposer]:
    plan = validation.plan_sweep(config, [*config.hydra.overrides.hydra, *overrides], sweeper)
    folder = Path(config.hydra.sweep.dir).absolute()
    if not any(override.startswith(validation.SWEEP_DIR_KEY) for override in config.hydra.overrides.hydra):
        folder = contents.create_unique(folder)
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(folder)
    state = SweepState.create(
        folder,
        overrides=plan.stored,
        swept=plan.swept,
        sweeper=validation.plugin_name(sweeper),
        launcher=validation.plugin_name(backend),
        base_rows=plan.base.rows,
        base_tokens=plan.base.tokens,
    )
    try:
        for point in plan.points if sweeper.is_grid else ():
            state.add_job(point)
        snapshot.save_snapshot(state.folder, plan.composer.shared)
        for groups in plan.composer.group_choices:
            snapshot.extend_snapshot(state.folder, [*plan.composer.shared, *groups], paths.CONF_DIR)
        state.write()
    except BaseException:
        state.discard()
        state.close()
        raise
    return state, plan.composer
