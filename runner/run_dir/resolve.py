"""Which folder is meant, and which may be taken."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path

from common.errors import UserError, did_you_mean_path
from common.paths import outputs_dir
from runner.checkpoint.atomic_dir import verify_dir
from runner.config.flags import flag_value
from runner.run_dir import saved_config
from runner.run_dir.naming import find_runs

SWEEP_FILE = "sweep.json"


def is_sweep_dir(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def resolve_run(name: str) -> Path:
    """The run or sweep that `resume=` names: its folder, anything inside it, or `last`. A file of a sweep that is in no job means the sweep."""
    if name == "last":
        runs = find_runs(outputs_dir())
        if not runs:
            raise UserError("there is no run yet", "resume=last", "start one: python runner/train.py")
        return max(runs, key=_newest_launched)
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise UserError("there is no such file or folder", f"resume={name}", did_you_mean_path(name))
    if (place := enclosing_run(path)) is None:
        raise UserError("there is no run here", f"resume={name}", "give the folder of a run: it holds a run.json")
    _check_checkpoint(place, path)
    return place


def enclosing_run(path: Path) -> Path | None:
    """The innermost run or sweep that `path` is, or lies in."""
    return next((place for place in (path, *path.parents) if (place / "run.json").is_file() or is_sweep_dir(place)), None)


def _newest_launched(run: Path) -> float:
    """When its training last began. The time of the file says less: a launch that is refused writes it too."""
    try:
        return datetime.fromisoformat(json.loads((run / "run.json").read_text())["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):  # it has not begun
        return (run / "run.json").stat().st_mtime


def _check_checkpoint(run: Path, path: Path) -> None:
    """A run continues from its newest checkpoint: one that is named must be that one, and whole."""
    inside = path.relative_to(run).parts
    if len(inside) < 2 or inside[0] != "checkpoints":
        return
    named = run / "checkpoints" / inside[1]
    if reason := verify_dir(named):
        raise UserError(f"this checkpoint is not whole: {reason}", str(named), f"resume={run} continues from the newest that is")
    newer = [other.name for other in named.parent.glob("step-*") if other.name > named.name]
    if newer:
        raise UserError(f"there are newer checkpoints: {', '.join(sorted(newer))}", str(named), f"resume={run}, or start a new run from these weights")


def check_not_inside_run(folder: Path) -> None:
    """Refuse to start a run in a sweep, whose jobs come by resume=, or within another run. A run in `folder` itself is its Record's to refuse."""
    if sweep := next(filter(is_sweep_dir, (folder, *folder.parents)), None):
        what = "this folder holds a sweep" if sweep == folder else "this folder lies inside a sweep"
        raise UserError(what, str(folder), f"continue it with resume={sweep}, or place this run elsewhere with hydra.run.dir=DIR")
    if run := next((place for place in folder.parents if (place / "run.json").is_file()), None):
        raise UserError("this folder lies inside a run", str(folder), f"continue that with resume={run}, or place this run elsewhere with hydra.run.dir=DIR")


def check_resumable_flags(flags: list[str]) -> None:
    """Refuse Hydra's other ways to run something again. They lose the schema, the run's folder, or what it has learned."""
    for names in (("--config-path", "-cp"), ("--experimental-rerun",), ("--config-dir", "-cd"), ("--config-name", "-cn")):
        if (value := flag_value(flags, *names)) is None or (names[1:] == ("-cn",) and value == "config"):
            continue
        run = enclosing_run(Path(value).expanduser().absolute())
        what = "a run is not started from the inside of another" if run else "this program is composed from its own conf/"
        raise UserError(
            what, f"{names[0]} {value}", _suggested_path(run) if run else "put your file into a folder of conf/ and choose it by its name, e.g. experiment=mine"
        )


def _suggested_path(run: Path) -> str:
    try:
        words = "" if is_sweep_dir(run) else shlex.join(saved_config.load_overrides(run))
    except ValueError:
        return f"continue it with resume={run}"
    return f"continue it with resume={run}" if is_sweep_dir(run) else f"continue it with resume={run}; anew: python runner/train.py {words}".rstrip()
