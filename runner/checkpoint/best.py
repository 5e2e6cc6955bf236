"""Weights of the best evaluation: in the checkpoint of that step where there is one, otherwise in a folder of their own.

best-00000040/ model.safetensors  weights of step 40, as in a checkpoint
               MANIFEST.json      size and checksum, the step, and the loss of its evaluation
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from common.filesystem import Chunks, read_bounded
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import TENSOR_FILES, checkpoint_name, read_state, step_of

BEST_DIR = re.compile(r"best-[0-9]{8}")
BEST_POINTER = "best"  # file with the name of the folder that holds the best weights


def best_dirname(step: int) -> str:
    return f"best-{step:08d}"


def write_best_weights(checkpoints: Path, step: int, loss: float, weights: Callable[[], Chunks], size: int) -> None:
    """Commit the weights of `step` (`size` bytes) as a folder of their own. Raises OSError."""
    atomic_dir.write_atomic_dir(checkpoints, best_dirname(step), {TENSOR_FILES["model"]: weights}, {"step": step, "loss": loss}, expected=size)
    point_to_best(checkpoints, step)


def find_best_weights(checkpoints: Path, step: int) -> Path | None:
    """Return the valid folder whose model.safetensors holds the weights of `step`; None if there is none."""
    candidates = (checkpoints / checkpoint_name(step), checkpoints / best_dirname(step))
    return next((folder for folder in candidates if folder.is_dir() and atomic_dir.verify_dir(folder) is None), None)


def point_to_best(checkpoints: Path, step: int | None) -> bool:
    """Write the name of the folder with the weights of `step` to the file `best`; return whether there is such a folder.

    Without a step the file is removed: no evaluation of this run counts.
    """
    if step is None:
        (checkpoints / BEST_POINTER).unlink(missing_ok=True)
        return False
    name = next((name for name in (checkpoint_name(step), best_dirname(step)) if (checkpoints / name).is_dir()), None)
    if name is not None:
        atomic_dir.write_pointer(checkpoints, BEST_POINTER, name)
    return name is not None


def pointed_best_step(checkpoints: Path) -> int | None:
    """Return the step of the folder that the file `best` names, or None."""
    try:
        return step_of(read_bounded(checkpoints / BEST_POINTER, 64).decode().strip())
    except (OSError, ValueError):
        return None


def referenced_best_steps(checkpoints: Path, newest: int | None) -> set[int]:
    """Return the best step of each of the `newest` checkpoints (None: all): a resume from any of them needs these weights."""
    steps = set()
    for name in atomic_dir.step_names(checkpoints)[:newest]:
        try:
            steps.add(read_state(checkpoints / name)["progress"].get("best_step"))
        except (OSError, ValueError, LookupError, AttributeError, TypeError):  # damaged: no resume starts from it
            continue
    return {step for step in steps if isinstance(step, int)}


def prune_best_dirs(checkpoints: Path, needed: Iterable[int]) -> None:
    """Delete the folders of best weights except those of the steps `needed`."""
    kept = {best_dirname(step) for step in needed}
    for folder in best_dirs(checkpoints):
        if folder.name not in kept:
            atomic_dir.discard_dir(folder)


def discard_best_after(checkpoints: Path, step: int) -> None:
    """Delete best weights of later steps than `step`, which a run resumes from: these steps are trained again, perhaps with other settings."""
    for folder in best_dirs(checkpoints):
        if folder.name > best_dirname(step):
            atomic_dir.discard_dir(folder)


def best_dirs(checkpoints: Path) -> list[Path]:
    """Return the folders of best weights, oldest first."""
    return [folder for folder in sorted(checkpoints.glob("best-*")) if BEST_DIR.fullmatch(folder.name)]
