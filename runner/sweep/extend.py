"""Words behind resume= of a sweep, and its jobs that have begun: which of them take a word, which are left as they are, what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.errors import UserError
from common.filesystem import read_bounded
from runner.config import schema
from runner.engine.config import Config, TrainConfig
from runner.run_dir import resume
from runner.run_dir.lock import MAX_JSON_BYTES
from runner.run_dir.metadata import read_run_metadata
from runner.sweep import budget
from runner.sweep.state import SweepJob

STEPS_KEY = "train.max_steps"
LENGTH_KEYS = (f"{STEPS_KEY}:", "train.epochs:")  # where it moves a job no further the job lacks nothing


def overrides_for_job(run: Path, job: SweepJob, words: list[str], given: int) -> list[str]:
    """Those of `words` that a job which has begun is continued with; none for a completed one that they would train no step further.

    `given`: its train.max_steps as the sweep has had it so far. Raises ValueError(what, where, fix) for what it could not take, or,
    completed and trained no further, would lack beside the jobs that get it.
    """
    from runner.checkpoint.compatibility import diff_facts

    before, progress = resume.plan_resume(run, []).config, _saved_progress(run)
    after, step = resume.plan_resume(run, words).config, progress["step"]
    if step > (after.train.max_steps or step):
        if before.train.max_steps <= given:
            raise UserError(
                f"jobs of this sweep stand at step {step} already",
                f"{run.name}: {STEPS_KEY}={after.train.max_steps}",
                "give a larger number; a run does not go back",
            )
        print(f"resume: {run.name} was continued by hand to step {step}: {STEPS_KEY} stays as it is there", file=sys.stderr)
        words = [word for word in words if not word.startswith(f"{STEPS_KEY}=")]
        after = resume.plan_resume(run, words).config
    found = diff_facts(_saved_compatibility(before), _saved_compatibility(after))
    if found["refused"]:
        raise UserError("jobs of this sweep have begun without it", f"{run.name}: {found['refused'][0]}", "leave the word out, or start another sweep with it")
    if job["status"] != "completed" or _would_train_further(run, before.train, after.train, progress):
        return words
    if lacking := [change for change in found["course"] if not change.startswith(LENGTH_KEYS)]:
        fix = f"start another sweep with it, or add {STEPS_KEY}=N with more than {step} to go on"
        raise UserError("jobs of this sweep are completed without it", f"{run.name}: {lacking[0]}", fix)
    return []


def _would_train_further(run: Path, before: TrainConfig, after: TrainConfig, progress: dict[str, int]) -> bool:
    """Whether a completed run would take another step: what the words name says nothing, what they come to does."""
    if 0 < after.patience <= progress["evals_since_best"]:
        if (before.max_steps, before.epochs) != (after.max_steps, after.epochs):
            print(f"resume: {run.name} was stopped by train.patience at step {progress['step']}: it is left as it is", file=sys.stderr)
        return False
    if after.max_steps:
        return progress["step"] < after.max_steps
    if before.max_steps or after.epochs < before.epochs:
        raise UserError(
            "whether this goes further than completed jobs cannot be told", f"{run.name}: train.epochs={after.epochs}", f"give {STEPS_KEY}=N instead"
        )
    return after.epochs > before.epochs or 0 < before.patience <= progress["evals_since_best"]


def _saved_progress(run: Path) -> dict[str, int]:
    """The step the run has come to, and its evaluations without a better loss."""
    found = {"step": int(read_run_metadata(run).get("step") or 0), "evals_since_best": 0}
    for path in sorted(run.glob("checkpoints/step-*/state.json"), reverse=True):
        try:
            told = json.loads(read_bounded(path, MAX_JSON_BYTES))["progress"]
            return {"step": max(found["step"], int(told["step"])), "evals_since_best": int(told["evals_since_best"])}
        except (OSError, ValueError, KeyError, TypeError):  # torn; the one before it will be taken up
            continue
    return found


def _saved_compatibility(config: Config) -> dict[str, Any]:
    tree = OmegaConf.structured(config)
    values = {word: OmegaConf.select(tree, word) for word, kind in schema.config_schema().items() if not is_dataclass(kind)}
    return values | {"rows of a step": budget.rows_per_step(config)}
