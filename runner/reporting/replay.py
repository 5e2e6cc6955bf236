"""Write a finished run, or the jobs of a sweep, to a tracker: `report.py to=NAME`.

The files are offline ones; nothing is sent.
"""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

from common.errors import TrainingError, UserError, print_safely
from runner.config.compose import compose_config
from runner.reporting.runs import Run, as_dict, is_file
from runner.run_dir.contents import find_runs, is_sweep_dir
from runner.run_dir.saved_config import load_saved_config
from runner.tracking.config import TRACKERS, ExternalTrackerConfig
from runner.tracking.tracker_process import TrackerProcess, describe_experiment

REPLAY_SECONDS = 600.0  # one run; a million records take TensorBoard and SwanLab less
REPLAYED_STATUS = {"completed": "completed", "interrupted": "interrupted", "running": "interrupted"}  # others: failed


def is_tracker(name: str | None) -> bool:
    """Return whether `to=name` names a tracker, and not a file."""
    return name in TRACKERS.names() and name != "none"


def replay(folder: Path, name: str) -> None:
    """Write the run in `folder`, or each job of the sweep, to the tracker `name`, and print where it is.

    What an earlier replay wrote is replaced.

    Raises UserError if the run still trains or has logged nothing, TrainingError if the tracker fails.
    """
    config = compose_config([f"tracker={name}"]).tracker
    if not isinstance(config, ExternalTrackerConfig):
        raise UserError(
            f"the tracker {name} cannot write a run afterwards",
            f"to={name}",
            "its class must extend ExternalTrackerConfig",
        )
    config.check_installed()
    runs = sorted(find_runs(folder)) if is_sweep_dir(folder) else [folder]
    logged = [run for run in runs if any(_log_sizes(run).values())]
    if not logged:
        raise UserError("nothing has been logged there yet", f"run={folder}", "run=last, or sweep=last")
    for run in logged:
        if Run.read(run).is_running:
            raise UserError(
                f"{run} still trains", f"to={name}", f"wait for its end; tracker={name} follows a run while it trains"
            )
    for run in logged:
        replay_run(run, config)
    if len(logged) < len(runs):
        print_safely(f"{len(runs) - len(logged)} jobs have logged nothing and are left out")


def replay_run(run: Path, config: ExternalTrackerConfig) -> None:
    """Write one run to its tracker, with the id that it has there already or the id of the run."""
    fields, saved = Run.read(run).fields, load_saved_config(run)
    status = REPLAYED_STATUS.get(fields["status"], "failed")
    warnings: list[str] = []
    project = as_dict(saved.get("tracker")).get("project")  # that it was logged to while it trained
    project = project if isinstance(project, str) and project else config.project
    settings = dataclasses.asdict(dataclasses.replace(config, mode="offline", project=project))
    tracker = TrackerProcess(config.command() or [], run / config.name, print_safely, warnings.append)
    tracker.start(
        settings=settings,
        id=str(fields.get("tracker_id") or fields["id"] or run.name),
        config={name: value for name, value in saved.items() if name != "hydra"},
        history=_log_sizes(run),
        is_replay=True,
        **describe_experiment(run, saved),
    )
    tracker.finish(status, fields["error"])
    if not tracker.wait(time.monotonic() + REPLAY_SECONDS):
        reason = (
            re.sub(r" \(training continues;.*", "", warnings[0])
            if warnings
            else f"it failed; {run / config.name / 'tracker.log'} has the cause"
        )
        raise TrainingError(f"{run} could not be written: {reason}")


def _log_sizes(run: Path) -> dict[str, int]:
    paths = {name: run / f"{name}.jsonl" for name in ("metrics", "samples")}
    return {name: path.stat().st_size if is_file(path) else 0 for name, path in paths.items()}
