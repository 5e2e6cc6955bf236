"""Verification of exact resume: train a run, train it again with a stop in the middle, and compare every byte."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import Interrupted, StopRequested
from runner.checkpoint.compatibility import WRITTEN_BY
from runner.checkpoint.format import CHECKPOINTS_DIR, TENSOR_FILES, read_state, step_of
from runner.checkpoint.manager import newest_checkpoint
from runner.checkpoint.saving import BEST_POINTER, read_pointer
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.device.cpu import fix_threads
from runner.engine.device.rng import seed_all
from runner.engine.loop import train
from runner.run_dir.metadata import RunMetadata

VERIFY_STEPS = 10  # if train.max_steps is 0
# Times, and positions in files whose times have more or fewer digits
EXCLUDED_METRICS = {"time", "attempt", "tokens_per_second", "data_wait", "save_stall", "peak_memory"}
EXCLUDED_STATE = {"log", "log_sha256", "tracker_id", "run"}


def verify_resume(cfg: Config, work_dir: Path) -> list[str]:
    """Return the differences between a run of `cfg` and the same run stopped half way and resumed; [] if all bits are
    equal. Raises StopRequested if a signal stops one of them.
    """
    cfg = replace(cfg, train=replace(cfg.train, max_steps=cfg.train.max_steps or VERIFY_STEPS, max_hours=0, stop_at=0))
    uninterrupted, resumed = work_dir / "uninterrupted", work_dir / "resumed"
    fix_threads()
    train_to_step(cfg, uninterrupted, None)
    train_to_step(cfg, resumed, stop_at=max(1, cfg.train.max_steps // 2))
    seed_all(secrets.randbits(32))  # the second half must not depend on random states left in this process
    train_to_step(cfg, resumed, None)
    return diff_run_dirs(uninterrupted, resumed)


def train_to_step(cfg: Config, run_dir: Path, stop_at: int | None) -> None:
    """Start or resume the run in `run_dir`, and train to step `stop_at`, or to the end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    attempt = 2 if (run_dir / "checkpoints").exists() else 1
    state = build_run(copy.deepcopy(cfg), RunMetadata.detached(run_dir, attempt))
    try:
        train(state, stop_requested=lambda: state.progress.step == stop_at)
    except Interrupted:
        if state.progress.step != stop_at:
            raise StopRequested from None
    state.logger.finish("completed" if stop_at is None else "interrupted")


def diff_run_dirs(one: Path, other: Path) -> list[str]:
    """Return what differs between the newest checkpoints, the best weights and the metrics of two runs, by file and
    key.
    """
    first, second = (newest_checkpoint(run_dir) for run_dir in (one, other))
    differences = [] if first.name == second.name else [f"newest checkpoint: {first.name} and {second.name}"]
    differences += [
        file for file in TENSOR_FILES.values() if (first / file).read_bytes() != (second / file).read_bytes()
    ]
    differences += [] if _best_weights(one) == _best_weights(other) else ["best weights"]
    differences += [
        f"state.json: {key}"
        for key in _differing_keys(_comparable_state(first), _comparable_state(second))
        if key not in EXCLUDED_STATE
    ]
    records = [
        [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()] for run_dir in (one, other)
    ]
    return differences + [f"metrics.jsonl: {difference}" for difference in _diff_metrics(*records)]


def _comparable_state(checkpoint: Path) -> dict[str, Any]:
    """Return state.json without the path of the tokenizer, which each run directory has a copy of (its fingerprint is
    compared), and without the commit.
    """
    state = read_state(checkpoint)
    facts = {
        fact: value
        for fact, value in state["compatibility"].items()
        if fact != "data.tokenizer" and not fact.startswith(f"{WRITTEN_BY}.")
    }
    return state | {"compatibility": facts}


def _best_weights(run_dir: Path) -> tuple[int, bytes] | None:
    """Return the best step and its weights.

    They are in a checkpoint or in a folder of their own, as the run was stopped at this step or not.
    """
    checkpoints = run_dir / CHECKPOINTS_DIR
    if (name := read_pointer(checkpoints / BEST_POINTER)) is None:
        return None
    weights = checkpoints / name / TENSOR_FILES["model"]
    return (step_of(name), weights.read_bytes()) if weights.is_file() else None


def _differing_keys(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _diff_metrics(records: list[dict[str, Any]], others: list[dict[str, Any]]) -> Iterator[str]:
    if len(records) != len(others):
        yield f"{len(records)} and {len(others)} lines"
    for record, other in zip(records, others, strict=False):
        if keys := set(_differing_keys(record, other)) - EXCLUDED_METRICS:
            yield f"{record['kind']} at step {record['step']}: {', '.join(sorted(keys))}"
