"""Open the logs of a run: its header, the notes about its data, and the monitor of its numbers."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import torch

from common.filesystem import WEAKER_PROMISES
from common.paths import display_path
from data.batching.packing import PackedSequences
from models.language_model import count_parameters, trained_parameters
from runner.diagnostics.monitor import watch_records
from runner.diagnostics.symptoms import RunFacts
from runner.engine.state import TrainState
from runner.tracking.data_report import data_summary


def open_logs(state: TrainState) -> None:
    """Open the logs at the position of the checkpoint, and write what is known before the first step."""
    recovered = state.logger.start(
        run_summary(state),
        total_steps=state.total_steps,
        attempt=state.metadata.attempt,
        run_config=dataclasses.asdict(state.cfg),
        saved=state.saved_logs,
        tracker_id=state.tracker_id or state.metadata.fields["id"],
        first_step=state.progress.step,
        first_tokens=state.progress.tokens,
    )
    if recovered:
        state.metadata.update(recovered=recovered)
    state.logger.show_data(state.pipeline.files)
    for note in state.pipeline.notes:
        state.logger.info(note)
    for warning in (*state.pipeline.warnings, *WEAKER_PROMISES):
        state.logger.warning(warning)
    watch_numbers(state)


def watch_numbers(state: TrainState) -> None:
    """Let the logger warn, once each, of what the logged numbers say: docs/guide/troubleshooting.md.

    Records of earlier attempts count.
    """
    if not state.dist.is_rank_zero:
        return
    cfg = state.cfg
    facts = RunFacts(
        total_steps=state.total_steps,
        lr=cfg.optimizer.lr,
        warmup_steps=cfg.schedule.warmup_steps,
        grad_clip=cfg.optimizer.grad_clip,
        num_workers=cfg.data.num_workers,
        cores=os.cpu_count() or 1,
        starts_from_weights=cfg.init_from != "scratch",
        uniform_loss=state.objective.uniform_loss(cfg.model.vocab_size),
    )
    state.logger.watch_record = watch_records(
        facts, state.run_dir / "metrics.jsonl" if state.progress.step else None, state.logger.warning
    )


def run_summary(state: TrainState) -> dict[str, str]:
    """Return the header of the log, title -> text."""
    cfg, ranks = state.cfg, state.dist.size
    model, unused = state.model, state.model.modules_unused_by_text
    parameters = count_parameters(model)
    trainable = sum(p.numel() for p in trained_parameters(model).values())
    trained = (
        "all trained" if trainable == parameters else f"{trainable:,} of them trained ({trainable / parameters:.2%})"
    )
    trained += f"\ntext does not use {', '.join(unused)}: no gradient, no adapter" if unused else ""
    labels = (("name", cfg.run.name), ("tags", ", ".join(cfg.run.tags)), ("note", cfg.run.note))
    threads = f"{torch.get_num_threads()} threads" + (f" ({state.thread_reason})" if state.thread_reason else "")
    summary = {
        "run": display_path(state.run_dir),
        **{title: text for title, text in labels if text},
        "stage": f"{cfg.stage.name}, weights from {cfg.init_from if cfg.init_from == 'scratch' else display_path(Path(cfg.init_from))}",
        "model": f"{cfg.model.name}, {parameters:,} parameters, {trained}",
        **({"kernels": state.model.kernels_description} if state.model.kernels_description else {}),
        "tokenizer": f"{state.tokenizer.vocab_size:,} tokens, {display_path(Path(cfg.data.tokenizer))}",
        "data": data_summary(
            cfg.data.paths, state.pipeline.files, len(state.pipeline.train.rows), state.pipeline.held_out
        ),
        "batch": batch_summary(state),
        "steps": f"{state.total_steps:,} ({state.total_steps / state.loader.steps_per_epoch:.2f} epochs of {state.loader.steps_per_epoch:,} steps)",
        "device": f"{state.dist.device}, {cfg.precision.name}, {threads}"
        + (f", {cfg.distributed.name} on {ranks} ranks" if ranks > 1 else ""),
        "compile": state.compile_decision.reason,
        **state.kernel_reasons,
    }
    if branched := state.metadata.fields["branched_from"]:
        summary["branched from"] = f"{display_path(Path(str(branched.get('run'))))} at step {branched.get('step')}"
    return summary | (
        {"resumed": f"at step {state.progress.step:,} (attempt {state.metadata.attempt})"}
        if state.progress.step
        else {}
    )


def batch_summary(state: TrainState) -> str:
    """Return the rows of a step: micro-batch, accumulation and ranks."""
    train, sequences, ranks, rows = (
        state.cfg.train,
        state.pipeline.train,
        state.dist.size,
        state.loader.sampler.global_batch_size,
    )
    if isinstance(sequences, PackedSequences):
        kind = f"packed sequences of {sequences.capacity:,} tokens"
        details = f"\n{len(sequences.rows) / len(sequences):.1f} examples in each, {sequences.fill_ratio:.1%} filled"
    else:
        kind, details = f"examples of at most {state.cfg.data.max_length:,} tokens", ""
    rows_of_rank = math.ceil(rows / ranks)
    micro_batches = math.ceil(rows_of_rank / train.batch_size)
    if rows > (available := state.loader.sampler.size):
        details = f", of which an epoch has {available:,}{details}"
    return f"{min(train.batch_size, rows_of_rank):,} {kind} x {micro_batches} micro-batches{f' x {ranks} ranks' if ranks > 1 else ''} = {rows:,} a step{details}"
