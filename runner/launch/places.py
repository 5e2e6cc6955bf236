"""Which folder is meant, and which may be taken."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path

from runner.engine.durable import verify
from runner.launch import stored
from runner.launch.folders import finished_runs
from runner.launch.refusal import nearest_path
from runner.launch.words import ROOT, value_of

SWEEP = "sweep.json"


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def find(name: str) -> Path:
    """The run or sweep that `resume=` names: its folder, anything inside it, or `last`. A file of a sweep that is in no job means the sweep."""
    if name == "last":
        runs = finished_runs(ROOT / "outputs")
        if not runs:
            raise ValueError("there is no run yet", "resume=last", "start one: python runner/train.py")
        return max(runs, key=_launched)
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise ValueError("there is no such file or folder", f"resume={name}", nearest_path(name))
    if (place := around(path)) is None:
        raise ValueError("there is no run here", f"resume={name}", "give the folder of a run: it holds a run.json")
    _check_checkpoint(place, path)
    return place


def around(path: Path) -> Path | None:
    """The innermost run or sweep that `path` is, or lies in."""
    return next((place for place in (path, *path.parents) if (place / "run.json").is_file() or is_sweep(place)), None)


def _launched(run: Path) -> float:
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
    if reason := verify(named):
        raise ValueError(f"this checkpoint is not whole: {reason}", str(named), f"resume={run} continues from the newest that is")
    newer = [other.name for other in named.parent.glob("step-*") if other.name > named.name]
    if newer:
        raise ValueError(f"there are newer checkpoints: {', '.join(sorted(newer))}", str(named), f"resume={run}, or start a new run from these weights")


def check_free(folder: Path) -> None:
    """Refuse to start a run in a sweep, whose jobs come by resume=, or within another run. A run in `folder` itself is its Record's to refuse."""
    if sweep := next(filter(is_sweep, (folder, *folder.parents)), None):
        what = "this folder holds a sweep" if sweep == folder else "this folder lies inside a sweep"
        raise ValueError(what, str(folder), f"continue it with resume={sweep}, or place this run elsewhere with hydra.run.dir=DIR")
    if run := next((place for place in folder.parents if (place / "run.json").is_file()), None):
        raise ValueError("this folder lies inside a run", str(folder), f"continue that with resume={run}, or place this run elsewhere with hydra.run.dir=DIR")


def check_flags(flags: list[str]) -> None:
    """Refuse Hydra's other ways to run something again. They lose the schema, the run's folder, or what it has learned."""
    for names in (("--config-path", "-cp"), ("--experimental-rerun",), ("--config-dir", "-cd"), ("--config-name", "-cn")):
        if (value := value_of(flags, *names)) is None or (names[1:] == ("-cn",) and value == "config"):
            continue
        run = around(Path(value).expanduser().absolute())
        what = "a run is not started from the inside of another" if run else "this program is composed from its own conf/"
        raise ValueError(
            what, f"{names[0]} {value}", _instead(run) if run else "put your file into a folder of conf/ and choose it by its name, e.g. experiment=mine"
        )


def _instead(run: Path) -> str:
    try:
        words = "" if is_sweep(run) else shlex.join(stored.words(run))
    except ValueError:
        return f"continue it with resume={run}"
    return f"continue it with resume={run}" if is_sweep(run) else f"continue it with resume={run}; anew: python runner/train.py {words}".rstrip()
