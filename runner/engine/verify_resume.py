"""A proof anybody can run: train, train again with a stop in the middle, and compare every byte."""

from __future__ import annotations

import copy
import dataclasses
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import Interrupted
from runner.checkpoint import manager
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.device.rng import seed_all
from runner.engine.loop import train

VERIFY_STEPS = 10  # where train.max_steps does not say how many
# All a stop may change: when things happened, and where they stand in files whose times have more or fewer digits.
EXCLUDED_METRICS = {"time", "attempt", "tokens_per_second", "data_wait", "save_stall"}
EXCLUDED_STATE = {"log", "tracker_id"}


def verify_resume(cfg: Config, folder: Path) -> list[str]:
    """What differs between a run of `cfg` and the same run stopped half way and resumed; empty when no bit does."""
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, max_steps=cfg.train.max_steps or VERIFY_STEPS))
    whole, stopped = folder / "whole", folder / "stopped"
    train_to_step(cfg, whole, None)
    train_to_step(cfg, stopped, stop_at=max(1, cfg.train.max_steps // 2))
    seed_all(secrets.randbits(32))  # whatever the first half left behind in this process must not help the second
    train_to_step(cfg, stopped, None)
    return diff_run_dirs(whole, stopped)


def train_to_step(cfg: Config, folder: Path, stop_at: int | None) -> None:
    """Train in `folder`, from where it stands, to the end or to step `stop_at`."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = 2 if (folder / "checkpoints").exists() else 1
    state = build_run(copy.deepcopy(cfg), folder, attempt, update_metadata=lambda **facts: None)
    try:
        train(state, stop=lambda: state.progress.step == stop_at)
    except Interrupted:
        assert stop_at is not None
    state.logger.finish("completed" if stop_at is None else "interrupted", {})


def diff_run_dirs(one: Path, other: Path) -> list[str]:
    """Where two run folders differ: in the newest checkpoint, any byte or word of it, and in the metrics."""
    first, second = (manager.newest_checkpoint(folder) for folder in (one, other))
    found = [] if first.name == second.name else [f"newest checkpoint: {first.name} and {second.name}"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        if (first / file).read_bytes() != (second / file).read_bytes():
            found.append(file)
    states = [json.loads((folder / "state.json").read_text()) for folder in (first, second)]
    found += [f"state.json: {word}" for word in _differing_keys(*states) if word not in EXCLUDED_STATE]
    return found + [f"metrics.jsonl: {line}" for line in _diff_metrics(_metric_lines(one), _metric_lines(other))]


def _differing_keys(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(word for word in one.keys() | other.keys() if one.get(word) != other.get(word))


def _diff_metrics(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[str]:
    if len(one) != len(other):
        yield f"{len(one)} and {len(other)} lines"
    for mine, theirs in zip(one, other, strict=False):
        if words := set(_differing_keys(mine, theirs)) - EXCLUDED_METRICS:
            yield f"{mine['kind']} at step {mine['step']}: {', '.join(sorted(words))}"


def _metric_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
