"""Results of optimizer steps: they stay on the device until several are fetched together, so that the host does not
wait for the GPU in between.

Steps that are not finite are handled when they are fetched; their updates were skipped on the device already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

from common.errors import DivergedError
from common.filesystem import write_json
from common.limits import peak_resident_bytes
from runner.diagnostics.symptoms import troubleshooting
from runner.engine.state import StepOutput, TrainState, finite_or_none

if TYPE_CHECKING:
    from data.batching.batch import Batch

MAX_PENDING_STEPS = 100  # bounds memory, and the delay until a failure is noticed
RECENT_LOSSES = 50  # losses that diagnosis.json shows


class StepResult(NamedTuple):
    """One step, on the host."""

    output: StepOutput
    means: dict[str, float]  # sums of the objective over all ranks / items
    grad_norm: float  # before clipping

    @property
    def is_finite(self) -> bool:
        """False: the update was skipped."""
        return math.isfinite(self.grad_norm)

    @property
    def first_nonfinite_parameter(self) -> str | None:
        """Name of the first parameter with a gradient that is not finite on this rank."""
        gradients = self.output.gradients
        return next(
            (
                name
                for name, norm in zip(gradients.names, gradients.norms.tolist(), strict=True)
                if not math.isfinite(norm)
            ),
            None,
        )

    @property
    def nonfinite_rows(self) -> list[str]:
        """Names of the rows in micro-batches of this rank with a loss that is not finite; [] if only gradients are not."""
        losses = torch.stack(self.output.losses).tolist()
        return [
            name
            for names, loss in zip(self.output.names, losses, strict=True)
            if not math.isfinite(loss)
            for name in names
        ]


def fetch_results(state: TrainState, steps: list[StepOutput]) -> list[StepResult]:
    """Wait for these steps on the device and sum over ranks; every rank must call it for the same steps.

    The gradient norm is the same on all ranks; their mean is not finite everywhere if it is not finite on one.
    """
    if not steps:
        return []
    sums = torch.stack([value for output in steps for value in output.sums.values()]).tolist()
    norms = torch.stack([output.gradients.norm for output in steps]).tolist()
    numbers = state.dist.all_reduce_sum([*sums, *norms])
    totals = iter(numbers[: len(sums)])
    return [
        StepResult(output, {name: next(totals) / output.counts.items for name in output.sums}, norm / state.dist.size)
        for output, norm in zip(steps, numbers[len(sums) :], strict=True)
    ]


def log_step(state: TrainState, lr: float, epoch: int, throughput: Throughput) -> None:
    """Log the newest step if that is due; otherwise fetch results as soon as something else reads them.

    That depends on settings and step numbers only: all ranks agree.
    """
    train, progress = state.cfg.train, state.progress
    is_logged = state.is_due(train.log_every)
    is_read = is_logged or any(map(state.is_due, (train.save_every, train.eval_every, train.sample_every)))
    if not (is_read or state.precision.uses_loss_scaling or len(state.pending_steps) >= MAX_PENDING_STEPS):
        return
    result = flush_steps(state)[-1]
    if not is_logged:
        return
    counts = {"epoch": epoch, "loss_tokens": progress.loss_tokens, "tokens": progress.tokens}
    metrics = {
        "lr": lr,
        "grad_norm": result.grad_norm,
        **throughput.read(),
        "save_stall": state.checkpoints.take_stall(),
        "peak_memory": peak_memory(state.dist.device),
    }
    if state.precision.uses_loss_scaling:
        metrics |= {"scale": state.precision.loss_scale, "overflows": progress.overflows}
    if progress.nonfinite_steps:
        metrics["skipped_steps"] = progress.nonfinite_steps
    with throughput.paused():  # files, the console and the page of the run
        # a metric of the objective with the name of another field is a TypeError
        state.logger.log("train", progress.step, **counts, **result.means, **metrics)


def flush_steps(state: TrainState) -> list[StepResult]:
    """Fetch all pending steps in order.

    Raises DivergedError after train.max_nonfinite_steps consecutive steps that are not finite.
    """
    progress = state.progress
    pending, state.pending_steps = state.pending_steps, []
    results = fetch_results(state, pending)
    for result in results:
        progress.recent_losses = [*progress.recent_losses, finite_or_none(result.means["loss"])][-RECENT_LOSSES:]
        progress.consecutive_nonfinite_steps = 0 if result.is_finite else progress.consecutive_nonfinite_steps + 1
        progress.zero_gradient_steps = progress.zero_gradient_steps + 1 if result.grad_norm == 0 else 0
        if not result.is_finite:
            progress.nonfinite_steps += 1
            _handle_nonfinite(state, result)
    return results


def _handle_nonfinite(state: TrainState, result: StepResult) -> None:
    """Warn, write diagnosis.json, and end the run if the limit is reached."""
    progress, output = state.progress, result.output
    per_rank = state.dist.gather([list(chain(*output.names)), result.first_nonfinite_parameter, result.nonfinite_rows])
    names = [name for *_, rows in per_rank for name in rows] or [name for rows, *_ in per_rank for name in rows]
    parameter = next((parameter for _, parameter, _ in per_rank if parameter), None)
    where = f"step {output.step}, rows {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    numbers = f"loss {result.means['loss']}, gradient norm {result.grad_norm}"
    state.logger.warning(
        f"{numbers}: not finite, update skipped ({where}; first in {parameter}); diagnosis.json has more; {troubleshooting('nan')}"
    )
    if state.dist.is_rank_zero:
        diagnosis = {
            "step": output.step,
            "rows": names,
            "loss": finite_or_none(result.means["loss"]),
            "grad_norm": finite_or_none(result.grad_norm),
            "first_parameter": parameter,
            "scale": state.precision.loss_scale,
            "consecutive_nonfinite_steps": progress.consecutive_nonfinite_steps,
            "recent_losses": progress.recent_losses,
        }
        try:
            write_json(state.run_dir / "diagnosis.json", diagnosis)
        except OSError as error:
            state.logger.warning(f"diagnosis.json could not be written: {error}")
    if state.precision.uses_loss_scaling:
        raise DivergedError(
            f"fp16 overflows even with loss scale {state.precision.loss_scale:g} ({where}); use precision=bf16 or a smaller optimizer.lr"
        )
    if progress.consecutive_nonfinite_steps >= state.cfg.train.max_nonfinite_steps:
        raise DivergedError(
            f"{progress.consecutive_nonfinite_steps} consecutive steps were not finite ({where}); "
            f"use a smaller optimizer.lr, or check these rows; {troubleshooting('nan')}"
        )


def peak_memory(device: torch.device) -> int:
    """Return the largest memory so far (bytes): of tensors on a GPU, otherwise of this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


@dataclass(eq=False)
class Throughput:
    """Tokens per second of training steps, without padding and without the time of saves, evaluation and samples; and
    the share of that time in which the device waited for data.
    """

    is_device_idle: Callable[[], bool]
    _tokens: int = 0
    _waited: float = 0.0
    _since: float = field(default_factory=lambda: time.perf_counter())

    def timed(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the steps, and measure how long the device waits for each."""
        while True:
            before = time.perf_counter()
            batches = next(steps, None)
            if self.is_device_idle():  # otherwise it is still computing earlier steps
                self._waited += time.perf_counter() - before
            if batches is None:
                return
            yield batches

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        now = time.perf_counter()
        elapsed = max(now - self._since, 1e-9)
        metrics = {"tokens_per_second": self._tokens / elapsed, "data_wait": self._waited / elapsed}
        self._tokens, self._waited, self._since = 0, 0.0, now
        return metrics
