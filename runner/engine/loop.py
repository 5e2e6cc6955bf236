"""The training engine: one loop for every stage. Read `train` and `walk` first, then `train_step`."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from typing import NoReturn

from common.errors import Interrupted, TrainingError, UserError
from data.batching.batch import Batch
from data.store.reader import DamagedStoreError
from runner.checkpoint import manager
from runner.engine.data_report import data_table
from runner.engine.evaluation import evaluate_and_sample_if_due
from runner.engine.export import export_model
from runner.engine.objectives.objective import LossSums, mask_dummy_batch
from runner.engine.optim.schedules import lr_at
from runner.engine.run_summary import run_summary
from runner.engine.state import TrainState
from runner.engine.step_metrics import Throughput, flush_steps, should_flush
from runner.engine.step_output import StepOutput, StepResult

DIVERGED_FACTOR = 2  # times the loss of a model that knows nothing


def train(state: TrainState, stop: Callable[[], bool] = lambda: False) -> float:
    """Carry `run` from the step it stands at to its last; returns the loss a sweep compares.

    Raises RunFailed, or Interrupted once `stop()` is true and the step it fell into is saved.
    """
    try:
        start_or_resume(state)
        train_steps(state, lambda: state.dist.any(stop()))
        return finish(state)
    except BaseException as error:
        if state.dist.size == 1:  # other ranks may be gone, and reading takes all of them
            with suppress(Exception):  # what ends the run is what is told
                flush_steps(state)
        if isinstance(error, DamagedStoreError):
            raise TrainingError(str(error).splitlines()[-1]) from error  # a data worker puts its traceback before it
        raise
    finally:
        state.dist.disarm_watchdog()
        state.checkpoint_writer.wait()  # a rank's process would not wait for the save it is in the midst of


def train_steps(state: TrainState, stop: Callable[[], bool]) -> None:
    """Every step that is left, and what is due after it."""
    progress, every = state.progress, state.cfg.train
    evaluate_and_sample_if_due(state)  # what was due right after the checkpoint we come from; nothing at step 0
    pace = Throughput(state.dist.is_device_idle)
    with closing(state.loader.iter_steps(progress.step, state.total_steps)) as steps:
        for batches in pace.waiting(steps):
            if state.finished:  # early
                break
            epoch = progress.step // state.loader.steps_per_epoch
            lr = lr_at(progress.step, state.total_steps, state.cfg.optimizer.lr, state.cfg.schedule)
            pace.add(step_with_retries(state, batches, lr, stop).tokens)
            if state.is_due(every.log_every):
                log_metrics(state, flush_steps(state)[-1], lr, epoch, pace)
            elif should_flush(state):
                flush_steps(state)
            manager.report_finished(state)
            if stop():
                save_and_interrupt(state)
            if state.is_due(every.save_every):
                manager.save_async(state)
            pace.pause(evaluate_and_sample_if_due, state)


def start_or_resume(state: TrainState) -> None:
    """Take up the newest checkpoint, where there is one, and open the logs at the place it names."""
    manager.load_newest(state)
    check_ranks_agree(state)
    if not state.finished and state.dist.is_rank_zero:
        shutil.rmtree(state.run_dir / "model", ignore_errors=True)  # of a run that is trained on: nobody should take it for the result
    state.logger.start(
        run_summary(state),
        total_steps=state.total_steps,
        attempt=state.attempt,
        run_config=dataclasses.asdict(state.cfg),
        resume_at=state.log_position,
        tracker_id=state.tracker_id,
    )
    state.logger.info(data_table(state.pipeline.files))


def check_ranks_agree(state: TrainState) -> None:
    """Refuse ranks that do not stand at the same place: on another machine there may be another folder, or other data."""
    found = state.dist.gather(
        [f"step {state.progress.step}", *(f"{word} {str(state.compatibility[word])[:12]}" for word in ("content of the data", "content of the tokenizer"))]
    )
    for rank, its in enumerate(found):
        if its != found[0]:
            odd = ", ".join(f"{mine} (rank 0: {theirs})" for mine, theirs in zip(its, found[0], strict=True) if mine != theirs)
            raise UserError(
                "the ranks do not see the same run", f"rank {rank}: {odd}", "every machine must see the run's folder and the data under the same paths"
            )


def save_and_interrupt(state: TrainState) -> NoReturn:
    """Save the step the run stands at, and stop."""
    flush_steps(state)
    manager.save_blocking(state)
    raise Interrupted(state.progress.step, state.run_dir)


def step_with_retries(state: TrainState, batches: list[Batch], lr: float, stop: Callable[[], bool]) -> StepOutput:
    """One step of the schedule, tried again while an fp16 overflow can be scaled away. What it found waits to be read."""
    progress = state.progress
    while state.precision.should_retry((found := train_step(state, batches, lr)).update):
        progress.overflows += 1
        if stop():
            save_and_interrupt(state)  # no weight has moved: the step before is where the run stands
    progress.step += 1
    progress.examples += found.examples
    progress.loss_tokens += found.loss_tokens
    progress.tokens += found.tokens
    state.pending_steps.append(found)
    return found


def train_step(state: TrainState, batches: list[Batch], lr: float) -> StepOutput:
    """One update from its micro-batches: count first, then divide every part by the same number. Nothing here waits for the device, but
    for experts, whose tokens are counted, and fp16."""
    state.wrapped.train()
    dist = state.dist
    mine = (sum(count) for count in zip(*((state.objective.count(b), b.num_supervised_tokens, b.num_tokens, len(b.names)) for b in batches), strict=True))
    items, loss_tokens, tokens, examples = map(int, dist.all_reduce_sum([*mine]))
    sums: LossSums = {}
    for number, batch in enumerate(batches, start=1):
        dist.arm_watchdog()
        with dist.no_sync_until_last(state.wrapped, last=number == len(batches)):
            with state.precision.autocast():
                parts = mask_dummy_batch(batch, state.objective.loss(state.wrapped, batch.to(dist.device)))
            # Gradients come out as the mean over ranks, and the sum is meant.
            state.precision.backward(parts["loss"] / (items / dist.size))
        for name, part in parts.items():
            sums[name] = sums.get(name, 0.0) + part.detach()
    state.optimizers.set_lr(lr)
    update = state.precision.step(state.optimizers, state.cfg.optimizer.grad_clip)
    names = [name for batch in batches for name in batch.names]
    return StepOutput(state.progress.step + 1, names, items, loss_tokens, tokens, examples, sums, update)


def log_metrics(state: TrainState, result: StepResult, lr: float, epoch: int, pace: Throughput) -> None:
    progress = state.progress
    numbers = {
        "epoch": epoch,
        "loss_tokens": progress.loss_tokens,
        "tokens": progress.tokens,
        **result.means,
        "lr": lr,
        "grad_norm": result.norm,
        **pace.read(),
        "save_stall": state.save_stall,
    }
    state.save_stall = 0.0
    if state.precision.name == "fp16":
        numbers |= {"scale": state.precision.loss_scale, "overflows": progress.overflows}
    if progress.nonfinite_steps:
        numbers["skipped_steps"] = progress.nonfinite_steps
    state.logger.log("train", progress.step, **numbers)


def finish(state: TrainState) -> float:
    """Prove the last checkpoint, write the final model folder, and say which loss a sweep should compare."""
    manager.save_blocking(state)
    loss = state.progress.recent_losses[-1] if state.progress.eval_loss is None else state.progress.eval_loss
    guess = math.log(state.cfg.model.vocab_size)
    if state.cfg.stage.objective == "next_token" and loss is not None and loss > DIVERGED_FACTOR * guess:
        raise TrainingError(f"diverged: the loss ends at {loss:.4g}, and knowing nothing costs {guess:.2f}: use a smaller optimizer.lr")
    if state.dist.is_rank_zero:
        manager.mark_best(state.run_dir / "checkpoints", state.progress.best_step)
        export_model(state)
    if state.stopped_early:
        state.logger.info(f"stopped early: no better evaluation in {state.cfg.train.patience} (best {state.progress.best_loss:.4f} at step {state.progress.best_step})")
    return math.inf if loss is None else loss
