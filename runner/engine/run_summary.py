"""FIXME runner.engine.run_summary."""

from __future__ import annotations

import torch

from data.batching.packing import PackedWindows
from runner.engine.state import TrainState


def run_summary(run: TrainState) -> dict[str, str]:
    train, data, feed, ranks = run.cfg.train, run.cfg.data, run.feed, run.world.size
    share = -(-run.loader.order.global_batch // ranks)
    learn, total = (sum(p.numel() for p in run.model.parameters() if p.requires_grad or not only) for only in (True, False))
    words = {
        "run": str(run.folder),
        "stage": f"{run.cfg.stage.name}, weights from {run.cfg.init_from}",
        "model": f"{run.cfg.model.name}, {total:,} parameters, {learn:,} of them learn",
        "data": f"{', '.join(data.paths)}, {len(feed.train.rows):,} rows" + (f", {feed.held_out:,} held out" if feed.held_out else ""),
        "step": f"{train.batch_size} {describe_batch_rows(run)} x {-(-share // train.batch_size)} accumulation" + (f" x {ranks} ranks" if ranks > 1 else ""),
        "steps": f"{run.total_steps:,} ({run.loader.steps_per_epoch:,} an epoch)",
        "computes": f"{run.cfg.precision.name} on {run.world.device}, {torch.get_num_threads()} threads, compile {run.compiling.said}"
        + (f", {run.cfg.distributed.name}" if ranks > 1 else ""),
    }
    return words | ({"resumed": f"at step {run.progress.step} (attempt {run.attempt})"} if run.progress.step else {})


def describe_batch_rows(run: TrainState) -> str:
    """What a line of a batch holds."""
    windows, length = run.feed.train, run.cfg.data.max_length
    if isinstance(windows, PackedWindows):
        return f"windows of {windows.capacity} positions, {len(windows.rows) / len(windows):.1f} rows each, {windows.fill:.1%} filled"
    return f"rows of at most {length} tokens"
