"""Start a sweep with --multirun, or resume one.

Hydra composes it and calls the sweeper plugin, which runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import print_note
from runner.config import snapshot
from runner.config.hydra_errors import translating_hydra_errors
from runner.config.literals import hydra_quote
from runner.config.overrides import is_hydra_override
from runner.sweep import extend, validation
from runner.sweep.grid import merge_overrides
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
            extend.extend_sweep(state, additions, conf)
        hydra_overrides = [override for override in additions.shared if is_hydra_override(override)]
        stored = merge_overrides(state.overrides, hydra_overrides)
        swept = [f"{key}={','.join(values)}" for key, values in state.swept.items()]
        launch = [validation.SWEEP_DIR_KEY + hydra_quote(str(folder)), "hydra.sweeper.resume=true"]
        other_flags = [flag for flag in flags if flag not in MULTIRUN_FLAGS]
        # from the copy in the sweep where conf/ has changed: a swept option may be gone from conf/
        with translating_hydra_errors(overrides):
            run_hydra([*stored, *swept, *launch], ["--multirun", *other_flags], conf if changed_files else None)
