"""The plan of one run: facts about its model and data, memory, disk, and whether it fits; and the overrides with which
it would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from runner.engine.config import Config
from runner.planning.alternatives import Alternative
from runner.planning.data import DataFacts
from runner.planning.machine import Machine
from runner.planning.memory import CUDA_CONTEXT, FP32, MemoryEstimate
from runner.planning.model import ModelSizes
from runner.planning.starts import PlannedRun

LOG_LINE = 330  # bytes of a line of metrics.jsonl and of train.log, together
TOKENIZER = 1 << 20  # bytes of the copy of a tokenizer, usually


@dataclass(frozen=True)
class DiskEstimate:
    checkpoint: int  # bytes of one
    checkpoints: int  # on disk at most: those that are kept, and the one that is being written
    best: int  # bytes of the weights of the best evaluation, where no checkpoint has them
    export: int  # bytes of model/
    logs: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.best + self.export + self.logs


@dataclass
class RunPlan:
    run: PlannedRun
    model: ModelSizes
    data: DataFacts
    memory: MemoryEstimate
    disk: DiskEstimate
    machine: Machine
    ranks: int  # on this machine
    alternatives: list[Alternative] = field(default_factory=list)
    trial: dict[str, Any] | None = None  # result.json of the trial
    notes: list[str] = field(default_factory=list)

    @property
    def needed_memory(self) -> int:
        """Bytes on the device: the estimate, or what the trial has measured if that is more."""
        context = CUDA_CONTEXT if self.machine.device == "cuda" else 0
        return max(self.trial["peak_bytes"] + context if self.trial else 0, self.memory.of_device)

    @property
    def fits_memory(self) -> bool:
        return self.needed_memory <= self.machine.memory

    @property
    def fits_disk(self) -> bool:
        return self.disk.total <= self.machine.free_disk

    @property
    def fits(self) -> bool:
        return self.fits_memory and self.fits_disk

    @property
    def steps(self) -> int:
        """Steps that are still to be trained."""
        return max(0, self.data.steps - self.run.done)

    @property
    def seconds(self) -> float | None:
        """Time of the training, with evaluations, samples and saves; None without a trial."""
        if self.trial is None:
            return None
        train, trial = self.run.config.train, self.trial
        evaluations = int(train.final_eval_rows > 0)
        if train.eval_every and self.run.config.evaluates:
            evaluations = self.steps // train.eval_every
        samples = self.steps // train.sample_every if train.sample_every and train.sample_prompts else 0
        saves = self.steps // train.save_every if train.save_every else 0
        return (
            trial["first_step_seconds"]
            + self.steps * trial["step_seconds"] * self.data.padding
            + evaluations * trial["eval_seconds"]
            + samples * trial["sample_seconds"]
            + saves * trial["save_stall_seconds"]
            + trial["save_seconds"]
        )


def estimate_disk(cfg: Config, facts: ModelSizes, steps: int) -> DiskEstimate:
    train = cfg.train
    saves = math.ceil(steps / train.save_every) if train.save_every else 1
    milestones = steps // train.keep_every if train.keep_every else 0
    kept = min(max(1, saves), train.keep_checkpoints + milestones + 1)
    adapters = cfg.stage.lora is not None
    return DiskEstimate(
        checkpoint=FP32 * (facts.trained + facts.optimizer_numbers(cfg.optimizer)),
        checkpoints=kept,
        best=FP32 * facts.trained if cfg.evaluates else 0,
        export=FP32 * (facts.trained if adapters else facts.parameters) + TOKENIZER,
        logs=2 * TOKENIZER + LOG_LINE * (steps // train.log_every),
    )
