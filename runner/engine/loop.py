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


def train(run: TrainState, stop: Callable[[], bool] = lambda: False) -> float:
    """Carry `run` from the step it stands at to its last; returns the loss a sweep compares.

    Raises RunFailed, or Interrupted once `stop()` is true and the step it fell into is saved.
    """
    try:
        start_or_resume(run)
        train_steps(run, lambda: run.world.any(stop()))
        return finish(run)
    except BaseException as error:
        if run.world.size == 1:  # other ranks may be gone, and reading takes all of them
            with suppress(Exception):  # what ends the run is what is told
                flush_steps(run)
        if isinstance(error, DamagedStoreError):
            raise TrainingError(str(error).splitlines()[-1]) from error  # a data worker puts its traceback before it
        raise
    finally:
        run.world.rest()
        run.writer.wait()  # a rank's process would not wait for the save it is in the midst of


def train_steps(run: TrainState, stop: Callable[[], bool]) -> None:
    """Every step that is left, and what is due after it."""
    progress, every = run.progress, run.cfg.train
    evaluate_and_sample_if_due(run)  # what was due right after the checkpoint we come from; nothing at step 0
    pace = Throughput(run.world.idle)
    with closing(run.loader.onward(progress.step, run.total_steps)) as steps:
        for batches in pace.waiting(steps):
            if run.finished:  # early
                break
            epoch = progress.step // run.loader.steps_per_epoch
            lr = lr_at(progress.step, run.total_steps, run.cfg.optimizer.lr, run.cfg.schedule)
            pace.add(step_with_retries(run, batches, lr, stop).positions)
            if run.due(every.log_every):
                log_metrics(run, flush_steps(run)[-1], lr, epoch, pace)
            elif should_flush(run):
                flush_steps(run)
            manager.report_finished(run)
            if stop():
                save_and_interrupt(run)
            if run.due(every.save_every):
                manager.save_async(run)
            pace.pause(evaluate_and_sample_if_due, run)


def start_or_resume(run: TrainState) -> None:
    """Take up the newest checkpoint, where there is one, and open the logs at the place it names."""
    manager.load_newest(run)
    check_ranks_agree(run)
    if not run.finished and run.world.leads:
        shutil.rmtree(run.folder / "model", ignore_errors=True)  # of a run that is trained on: nobody should take it for the result
    run.track.start(
        run_summary(run),
        total_steps=run.total_steps,
        attempt=run.attempt,
        run_config=dataclasses.asdict(run.cfg),
        resume_at=run.log_position,
        tracker_id=run.tracker_id,
    )
    run.track.say(data_table(run.feed.files))


def check_ranks_agree(run: TrainState) -> None:
    """Refuse ranks that do not stand at the same place: on another machine there may be another folder, or other data."""
    found = run.world.gather(
        [f"step {run.progress.step}", *(f"{word} {str(run.facts[word])[:12]}" for word in ("content of the data", "content of the tokenizer"))]
    )
    for rank, its in enumerate(found):
        if its != found[0]:
            odd = ", ".join(f"{mine} (rank 0: {theirs})" for mine, theirs in zip(its, found[0], strict=True) if mine != theirs)
            raise UserError(
                "the ranks do not see the same run", f"rank {rank}: {odd}", "every machine must see the run's folder and the data under the same paths"
            )


def save_and_interrupt(run: TrainState) -> NoReturn:
    """Save the step the run stands at, and stop."""
    flush_steps(run)
    manager.save_blocking(run)
    raise Interrupted(run.progress.step, run.folder)


def step_with_retries(run: TrainState, batches: list[Batch], lr: float, stop: Callable[[], bool]) -> StepOutput:
    """One step of the schedule, tried again while an fp16 overflow can be scaled away. What it found waits to be read."""
    progress = run.progress
    while run.precision.again((found := train_step(run, batches, lr)).update):
        progress.overflows += 1
        if stop():
            save_and_interrupt(run)  # no weight has moved: the step before is where the run stands
    progress.step += 1
    progress.rows += found.rows
    progress.tokens += found.labels
    run.unread.append(found)
    return found


def train_step(run: TrainState, batches: list[Batch], lr: float) -> StepOutput:
    """One update from its micro-batches: count first, then divide every part by the same number. Nothing here waits for the device, but
    for experts, whose tokens are counted, and fp16."""
    run.wrapped.train()
    world = run.world
    mine = (sum(count) for count in zip(*((run.objective.count(b), b.supervised, b.positions, len(b.names)) for b in batches), strict=True))
    items, labels, positions, rows = map(int, world.sums([*mine]))
    sums: LossSums = {}
    for number, batch in enumerate(batches, start=1):
        world.alive()
        with world.syncing(run.wrapped, last=number == len(batches)):
            with run.precision.autocast():
                parts = mask_dummy_batch(batch, run.objective.loss(run.wrapped, batch.to(world.device)))
            # Gradients come out as the mean over ranks, and the sum is meant.
            run.precision.backward(parts["loss"] / (items / world.size))
        for name, part in parts.items():
            sums[name] = sums.get(name, 0.0) + part.detach()
    run.optimizers.set_lr(lr)
    update = run.precision.step(run.optimizers, run.cfg.optimizer.grad_clip)
    names = [name for batch in batches for name in batch.names]
    return StepOutput(run.progress.step + 1, names, items, labels, positions, rows, sums, update)


def log_metrics(run: TrainState, result: StepResult, lr: float, epoch: int, pace: Throughput) -> None:
    progress = run.progress
    numbers = {
        "epoch": epoch,
        "tokens": progress.tokens,
        **result.means,
        "lr": lr,
        "grad_norm": result.norm,
        **pace.read(),
        "save_stall": run.save_stall,
    }
    run.save_stall = 0.0
    if run.precision.name == "fp16":
        numbers |= {"scale": run.precision.scale, "overflows": progress.overflows}
    if progress.nonfinite:
        numbers["skipped_steps"] = progress.nonfinite
    run.track.log("train", progress.step, **numbers)


def finish(run: TrainState) -> float:
    """Prove the last checkpoint, write the final model folder, and say which loss a sweep should compare."""
    manager.save_blocking(run)
    loss = run.progress.last_losses[-1] if run.progress.eval_loss is None else run.progress.eval_loss
    guess = math.log(run.cfg.model.vocab_size)
    if run.cfg.stage.objective == "next_token" and loss is not None and loss > DIVERGED_FACTOR * guess:
        raise TrainingError(f"diverged: the loss ends at {loss:.4g}, and knowing nothing costs {guess:.2f}: use a smaller optimizer.lr")
    if run.world.leads:
        manager.mark_best(run.folder / "checkpoints", run.progress.best_step)
        export_model(run)
    if run.stopped_early:
        run.track.say(f"stopped early: no better evaluation in {run.cfg.train.patience} (best {run.progress.best_loss:.4f} at step {run.progress.best_step})")
    return math.inf if loss is None else loss
