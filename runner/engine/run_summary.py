"""FIXME runner.engine.run_summary."""

from __future__ import annotations

import torch

from data.batching.packing import PackedSequences
from runner.engine.state import TrainState


def run_summary(state: TrainState) -> dict[str, str]:
    train, data, feed, ranks = state.cfg.train, state.cfg.data, state.pipeline, state.dist.size
    share = -(-state.loader.sampler.global_batch_size // ranks)
    learn, total = (sum(p.numel() for p in state.model.parameters() if p.requires_grad or not only) for only in (True, False))
    words = {
        "run": str(state.run_dir),
        "stage": f"{state.cfg.stage.name}, weights from {state.cfg.init_from}",
        "model": f"{state.cfg.model.name}, {total:,} parameters, {learn:,} of them learn",
        "data": f"{', '.join(data.paths)}, {len(feed.train.rows):,} rows" + (f", {feed.held_out:,} held out" if feed.held_out else ""),
        "step": f"{train.batch_size} {describe_batch_rows(state)} x {-(-share // train.batch_size)} accumulation" + (f" x {ranks} ranks" if ranks > 1 else ""),
        "steps": f"{state.total_steps:,} ({state.loader.steps_per_epoch:,} an epoch)",
        "computes": f"{state.cfg.precision.name} on {state.dist.device}, {torch.get_num_threads()} threads, compile {state.compile_decision.said}"
        + (f", {state.cfg.distributed.name}" if ranks > 1 else ""),
    }
    return words | ({"resumed": f"at step {state.progress.step} (attempt {state.attempt})"} if state.progress.step else {})


def describe_batch_rows(state: TrainState) -> str:
    """What a line of a batch holds."""
    windows, length = state.pipeline.train, state.cfg.data.max_length
    if isinstance(windows, PackedSequences):
        return f"windows of {windows.capacity} positions, {len(windows.rows) / len(windows):.1f} rows each, {windows.fill_ratio:.1%} filled"
    return f"rows of at most {length} tokens"
