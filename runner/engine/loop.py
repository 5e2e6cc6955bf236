"""The training engine: one loop for every stage. Read `train` and `walk` first, then `train_step`."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import NoReturn

import torch

from data.loader import Batch
from data.packing import Packed
from data.store import DamagedStore
from runner.engine import checkpoint
from runner.engine.export import export
from runner.engine.feed import table
from runner.engine.found import Found, Result
from runner.engine.judging import look
from runner.engine.objective import Sums, weighed
from runner.engine.optim import lr_at
from runner.engine.run import Interrupted, Run, RunFailed
from runner.engine.settle import overdue, settle

DIVERGED = 2  # times the loss of a model that knows nothing


def train(run: Run, stop: Callable[[], bool] = lambda: False) -> float:
    """Carry `run` from the step it stands at to its last; returns the loss a sweep compares.

    Raises RunFailed, or Interrupted once `stop()` is true and the step it fell into is saved.
    """
    try:
        begin(run)
        walk(run, lambda: run.world.any(stop()))
        return finish(run)
    except BaseException as error:
        if run.world.size == 1:  # other ranks may be gone, and reading takes all of them
            with suppress(Exception):  # what ends the run is what is told
                settle(run)
        if isinstance(error, DamagedStore):
            raise RunFailed(str(error).splitlines()[-1]) from error  # a data worker puts its traceback before it
        raise
    finally:
        run.world.rest()
        run.writer.wait()  # a rank's process would not wait for the save it is in the midst of


def walk(run: Run, stop: Callable[[], bool]) -> None:
    """Every step that is left, and what is due after it."""
    progress, every = run.progress, run.cfg.train
    look(run)  # what was due right after the checkpoint we come from; nothing at step 0
    pace = Pace(run.world.idle)
    with closing(run.loader.onward(progress.step, run.total_steps)) as steps:
        for batches in pace.waiting(steps):
            if run.finished:  # early
                break
            epoch = progress.step // run.loader.steps_per_epoch
            lr = lr_at(progress.step, run.total_steps, run.cfg.optimizer.lr, run.cfg.schedule)
            pace.add(take_step(run, batches, lr, stop).positions)
            if run.due(every.log_every):
                log(run, settle(run)[-1], lr, epoch, pace)
            elif overdue(run):
                settle(run)
            checkpoint.poll(run)
            if stop():
                leave(run)
            if run.due(every.save_every):
                checkpoint.save(run)
            pace.pause(look, run)


def begin(run: Run) -> None:
    """Take up the newest checkpoint, where there is one, and open the logs at the place it names."""
    checkpoint.load_newest(run)
    meet(run)
    if not run.finished and run.world.leads:
        shutil.rmtree(run.folder / "model", ignore_errors=True)  # of a run that is trained on: nobody should take it for the result
    run.track.start(
        header(run),
        total_steps=run.total_steps,
        attempt=run.attempt,
        run_config=dataclasses.asdict(run.cfg),
        resume_at=run.log_position,
        tracker_id=run.tracker_id,
    )
    run.track.say(table(run.feed.files))


def meet(run: Run) -> None:
    """Refuse ranks that do not stand at the same place: on another machine there may be another folder, or other data."""
    found = run.world.gather(
        [f"step {run.progress.step}", *(f"{word} {str(run.facts[word])[:12]}" for word in ("content of the data", "content of the tokenizer"))]
    )
    for rank, its in enumerate(found):
        if its != found[0]:
            odd = ", ".join(f"{mine} (rank 0: {theirs})" for mine, theirs in zip(its, found[0], strict=True) if mine != theirs)
            raise ValueError(
                "the ranks do not see the same run", f"rank {rank}: {odd}", "every machine must see the run's folder and the data under the same paths"
            )


def header(run: Run) -> dict[str, str]:
    train, data, feed, ranks = run.cfg.train, run.cfg.data, run.feed, run.world.size
    share = -(-run.loader.order.global_batch // ranks)
    learn, total = (sum(p.numel() for p in run.model.parameters() if p.requires_grad or not only) for only in (True, False))
    words = {
        "run": str(run.folder),
        "stage": f"{run.cfg.stage.name}, weights from {run.cfg.init_from}",
        "model": f"{run.cfg.model.name}, {total:,} parameters, {learn:,} of them learn",
        "data": f"{', '.join(data.paths)}, {len(feed.train.rows):,} rows" + (f", {feed.held_out:,} held out" if feed.held_out else ""),
        "step": f"{train.batch_size} {lines_of(run)} x {-(-share // train.batch_size)} accumulation" + (f" x {ranks} ranks" if ranks > 1 else ""),
        "steps": f"{run.total_steps:,} ({run.loader.steps_per_epoch:,} an epoch)",
        "computes": f"{run.cfg.precision.name} on {run.world.device}, {torch.get_num_threads()} threads, compile {run.compiling.said}"
        + (f", {run.cfg.distributed.name}" if ranks > 1 else ""),
    }
    return words | ({"resumed": f"at step {run.progress.step} (attempt {run.attempt})"} if run.progress.step else {})


def lines_of(run: Run) -> str:
    """What a line of a batch holds."""
    windows, length = run.feed.train, run.cfg.data.max_length
    if isinstance(windows, Packed):
        return f"windows of {windows.capacity} positions, {len(windows.rows) / len(windows):.1f} rows each, {windows.fill:.1%} filled"
    return f"rows of at most {length} tokens"


def leave(run: Run) -> NoReturn:
    """Save the step the run stands at, and stop."""
    settle(run)
    checkpoint.commit(run)
    raise Interrupted(run.progress.step, run.folder)


def take_step(run: Run, batches: list[Batch], lr: float, stop: Callable[[], bool]) -> Found:
    """One step of the schedule, tried again while an fp16 overflow can be scaled away. What it found waits to be read."""
    progress = run.progress
    while run.precision.again((found := train_step(run, batches, lr)).update):
        progress.overflows += 1
        if stop():
            leave(run)  # no weight has moved: the step before is where the run stands
    progress.step += 1
    progress.rows += found.rows
    progress.tokens += found.labels
    run.unread.append(found)
    return found


def train_step(run: Run, batches: list[Batch], lr: float) -> Found:
    """One update from its micro-batches: count first, then divide every part by the same number. Nothing here waits for the device, but
    for experts, whose tokens are counted, and fp16."""
    run.wrapped.train()
    world = run.world
    mine = (sum(count) for count in zip(*((run.objective.count(b), b.supervised, b.positions, len(b.names)) for b in batches), strict=True))
    items, labels, positions, rows = map(int, world.sums([*mine]))
    sums: Sums = {}
    for number, batch in enumerate(batches, start=1):
        world.alive()
        with world.syncing(run.wrapped, last=number == len(batches)):
            with run.precision.autocast():
                parts = weighed(batch, run.objective.loss(run.wrapped, batch.to(world.device)))
            # Gradients come out as the mean over ranks, and the sum is meant.
            run.precision.backward(parts["loss"] / (items / world.size))
        for name, part in parts.items():
            sums[name] = sums.get(name, 0.0) + part.detach()
    run.optimizers.set_lr(lr)
    update = run.precision.step(run.optimizers, run.cfg.optimizer.grad_clip)
    names = [name for batch in batches for name in batch.names]
    return Found(run.progress.step + 1, names, items, labels, positions, rows, sums, update)


def log(run: Run, result: Result, lr: float, epoch: int, pace: Pace) -> None:
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


def finish(run: Run) -> float:
    """Prove the last checkpoint, write the final model folder, and say which loss a sweep should compare."""
    checkpoint.commit(run)
    loss = run.progress.last_losses[-1] if run.progress.eval_loss is None else run.progress.eval_loss
    guess = math.log(run.cfg.model.vocab_size)
    if run.cfg.stage.objective == "next_token" and loss is not None and loss > DIVERGED * guess:
        raise RunFailed(f"diverged: the loss ends at {loss:.4g}, and knowing nothing costs {guess:.2f}: use a smaller optimizer.lr")
    if run.world.leads:
        checkpoint.note_best(run.folder / "checkpoints", run.progress.best_step)
        export(run)
    if run.stopped_early:
        run.track.say(f"stopped early: no better evaluation in {run.cfg.train.patience} (best {run.progress.best_loss:.4f} at step {run.progress.best_step})")
    return math.inf if loss is None else loss


class Pace:
    """Tokens per second of training, without the time spent on evaluation and samples, and the share of it that went by waiting for data."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.idle = idle  # whether the device has nothing left to do
        self.positions, self.waited, self.since = 0, 0.0, time.perf_counter()

    def add(self, positions: int) -> None:
        self.positions += positions

    def waiting(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        while True:
            before = time.perf_counter()
            batches = next(steps, None)
            if self.idle():  # a GPU that is still at work on earlier steps has not waited with us
                self.waited += time.perf_counter() - before
            if batches is None:
                return
            yield batches

    def pause(self, work: Callable[[Run], None], run: Run) -> None:
        before = time.perf_counter()
        work(run)
        self.since += time.perf_counter() - before

    def read(self) -> dict[str, float]:
        """Since the last reading."""
        now = time.perf_counter()
        spent = max(now - self.since, 1e-9)
        found = {"tokens_per_second": self.positions / spent, "data_wait": self.waited / spent}
        self.positions, self.waited, self.since = 0, 0.0, now
        return found
