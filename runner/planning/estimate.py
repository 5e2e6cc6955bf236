"""The plan of one run: facts about its model and data, memory, disk, and whether it fits; the overrides with which it
would; and all of it as text of 80 columns, and as JSON values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from runner.engine.config import Config
from runner.planning.alternatives import Alternative
from runner.planning.facts import DataFacts, Machine, ModelSizes
from runner.planning.memory import CUDA_CONTEXT, FP32, MemoryEstimate
from runner.planning.starts import PlannedRun
from runner.tracking.bar import wrap_text

LOG_LINE = 330  # bytes of a line of metrics.jsonl and of train.log, together
TOKENIZER = 1 << 20  # bytes of the copy of a tokenizer, usually
LABEL = 20
GIB, MIB = 2**30, 2**20


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
    def tokens(self) -> int:
        """Tokens of these steps."""
        return self.data.run_tokens * self.steps // self.data.steps

    @property
    def seconds(self) -> float | None:
        """Time of the training, with evaluations, samples and saves; None without a trial."""
        if self.trial is None:
            return None
        train, trial = self.run.config.train, self.trial
        evaluations = int(train.final_eval_rows > 0)
        if self.run.config.evaluates:
            evaluations = -(-self.steps // train.eval_every)
        samples = -(-self.steps // train.sample_every) if train.sample_every and train.sample_prompts else 0
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
        checkpoint=FP32 * (facts.trained + facts.optimizer_numbers(cfg)),
        checkpoints=kept,
        best=FP32 * facts.trained if cfg.evaluates else 0,
        export=FP32 * (facts.trained if adapters else facts.parameters) + TOKENIZER,
        logs=2 * TOKENIZER + LOG_LINE * (steps // train.log_every),
    )


def plan_text(plan: RunPlan) -> str:
    """Return the page of one run."""
    sections = [_model_lines(plan), _data_lines(plan), _memory_lines(plan), _time_lines(plan), [_disk_line(plan)]]
    if plan.notes:
        sections.append(_note_lines(plan.notes))
    return "\n\n".join([*map("\n".join, sections), verdict_text(plan)])


def sweep_text(plans: list[RunPlan], trials: int) -> str:
    """Return a table of the jobs of a sweep, their effective settings, and the total: of a study of `trials` as many of
    the largest.
    """

    def of_all(values: list[Any]) -> Any:
        return trials * max(values) if trials else sum(values)

    lines = [f"{'job':>3}  {'steps':>7}  {'tokens':>8}  {'memory':>9}  {'disk':>9}  {'time':>9}  fits"]
    for number, plan in enumerate(plans):
        time = "" if plan.seconds is None else duration_text(plan.seconds)
        cells = f"{plan.steps:>7,}  {short_count(plan.tokens):>8}  {bytes_text(plan.needed_memory):>9}  {bytes_text(plan.disk.total):>9}  {time:>9}"
        lines.append(f"{number:>3}  {cells}  {'yes' if plan.fits else 'no'}")
        if plan.run.overrides:
            lines.append(_wrapped(" " * 5, ", ".join(plan.run.overrides)))
    times = [plan.seconds for plan in plans if plan.seconds is not None]
    tokens = of_all([plan.tokens for plan in plans])
    disk, machine = of_all([plan.disk.total for plan in plans]), plans[0].machine
    total = f"{short_count(tokens)} tokens, {bytes_text(disk)} of disk"
    if len(times) == len(plans):
        total += f", {duration_text(of_all(times))} one after the other"
    number_text = f"at most {trials} jobs" if trials else f"{len(plans)} jobs, each to its last step"
    lines += ["", _wrapped("", f"total of {number_text}: {total}")]
    if notes := dict.fromkeys(note for plan in plans for note in plan.notes):
        lines += ["", *_note_lines(notes)]
    failing = [number for number, plan in enumerate(plans) if not plan.fits]
    if disk > machine.free_disk:
        needed = f"{bytes_text(disk)} of disk are needed, {bytes_text(machine.free_disk)} are free"
        lines += ["", _wrapped("does not fit: ", needed, 6)]
    elif not failing:
        lines += ["", f"fits: every job, alone, on {machine.device_name}"]
    for number in failing:
        lines += ["", f"job {number}: " + verdict_text(plans[number])]
    return "\n".join(lines)


def verdict_text(plan: RunPlan) -> str:
    machine, needed = plan.machine, plan.needed_memory
    where = f"{bytes_text(needed)} of {bytes_text(machine.memory)} memory, {bytes_text(plan.disk.total)} of {bytes_text(machine.free_disk)} free disk"
    if plan.fits:
        return _wrapped("fits: ", where)
    lines = [_wrapped("does not fit: ", where, 6)]
    if not plan.fits_disk:
        fix = "train.keep_checkpoints=2 train.keep_every=0, or start on another disk: hydra.run.dir=DIR"
        lines.append(_wrapped("  ", f"less disk: {fix}"))
    if plan.alternatives:
        lines += ["with these overrides:", *map(_alternative_line, plan.alternatives)]
        if not any(alternative.fits for alternative in plan.alternatives):
            lines.append("  none is enough: a smaller model (model=...), or a shorter data.max_length")
    return "\n".join(lines)


def plan_dict(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as JSON values; sizes in bytes, times in seconds."""
    return {
        "name": plan.run.name,
        "overrides": list(plan.run.overrides),
        "resumed_at": plan.run.done,
        "model": {name: getattr(plan.model, name) for name in ("parameters", "trained", "active")},
        "data": dataclasses.asdict(plan.data) | {"epochs": plan.data.epochs, "run_tokens": plan.data.run_tokens},
        "memory": {
            "total": plan.memory.total,
            "parts": dict(plan.memory.parts),
            "moment": plan.memory.moment,
            "ranks": plan.ranks,
        },
        "disk": dataclasses.asdict(plan.disk) | {"total": plan.disk.total},
        "machine": dataclasses.asdict(plan.machine),
        "time": None if plan.trial is None else {**plan.trial, "total_seconds": plan.seconds},
        "fits": plan.fits,
        "alternatives": [dataclasses.asdict(alternative) for alternative in plan.alternatives],
        "notes": plan.notes,
    }


def _model_lines(plan: RunPlan) -> list[str]:
    model, cfg = plan.model, plan.run.config
    lines = [
        _line("run", plan.run.name),
        _line("weights from", cfg.init_from),
        _line("model", f"{cfg.model.name}, {model.parameters:,} parameters"),
    ]
    if model.trained != model.parameters:
        lines.append(_line("trained", f"{model.trained:,} parameters ({model.trained / model.parameters:.1%})"))
    if model.active != model.parameters:
        lines.append(_line("active per token", f"{model.active:,} parameters"))
    return lines


def _data_lines(plan: RunPlan) -> list[str]:
    data = plan.data
    kind = "packed sequences" if data.shape.is_packed else "rows"
    micro_batches = f"{data.micro_batches:,} micro-batch{'es' * (data.micro_batches != 1)}"
    done = f", {plan.run.done:,} of them done" if plan.run.done else ""
    lines = [
        _line("rows per epoch", f"{data.rows:,}, {data.held_out:,} more held out; {data.tokens:,} tokens"),
        _line("step", f"{data.sequences_per_step:,} {kind} in {micro_batches}"),
        _line("longest micro-batch", f"{data.shape.rows} x {data.shape.tokens} tokens"),
        _line("steps", f"{data.steps:,} ({data.epochs:.2f} epochs, {data.run_tokens:,} tokens){done}"),
    ]
    if data.lost_tokens:
        is_longer = data.keeping_length > plan.run.config.data.max_length
        fix = f"; data.max_length={data.keeping_length} keeps 99 %" if is_longer else ""
        lines.append(_line("loss tokens cut off", f"{data.lost_tokens:,} ({data.lost_share:.1%}){fix}"))
    return lines


def _memory_lines(plan: RunPlan) -> list[str]:
    sizes = {**plan.memory.parts, "total": plan.memory.total}
    if plan.trial is not None:
        sizes["measured in trial"] = plan.trial["peak_bytes"]
    ranks = {"total": f" x {plan.ranks} ranks"} if plan.ranks > 1 else {}
    return [
        _line("memory", f"{plan.machine.device_name}, largest: {plan.memory.moment}"),
        *(f"  {name:<{LABEL}}{size / GIB:9.3f} GiB{ranks.get(name, '')}" for name, size in sizes.items()),
    ]


def _time_lines(plan: RunPlan) -> list[str]:
    trial = plan.trial
    if trial is None or plan.seconds is None:
        return [_line("time", "not measured")]
    seconds = {
        "first step": trial["first_step_seconds"],
        "longest step": trial["step_seconds"],
        "evaluation": trial["eval_seconds"],
        "samples": trial["sample_seconds"],
        "save": trial["save_seconds"],
    }
    rate = trial["step_tokens"] / trial["step_seconds"]
    return [
        _line("time", f"{duration_text(plan.seconds)} for {plan.steps:,} steps; compile {trial['compile']}"),
        *(f"  {name:<{LABEL}}{value:9.3f} s" for name, value in seconds.items() if value),
        f"  {'tokens per second':<{LABEL}}{rate:9,.0f}",
    ]


def _disk_line(plan: RunPlan) -> str:
    disk = plan.disk
    checkpoints = f"{disk.checkpoints:,} checkpoint{'s' * (disk.checkpoints != 1)} of {bytes_text(disk.checkpoint)}"
    best = f", best weights {bytes_text(disk.best)}" if disk.best else ""
    others = f"model/ {bytes_text(disk.export)}, logs {bytes_text(disk.logs)}"
    return _line("disk", f"{bytes_text(disk.total)}: {checkpoints}{best}, {others}")


def _note_lines(notes: Iterable[str]) -> list[str]:
    return [_wrapped("note: ", note) for note in notes]


def _alternative_line(alternative: Alternative) -> str:
    text = alternative.overrides + (f" ({alternative.changes})" if alternative.changes else "")
    return _wrapped(f"  {bytes_text(alternative.memory):>9} {'fits' if alternative.fits else '    '}  ", text)


def _line(label: str, text: str) -> str:
    return _wrapped(f"{label:<{LABEL}}", text)


def _wrapped(label: str, text: str, indent: int | None = None) -> str:
    """Return `label` and `text` in lines, the later ones with an indent: that of the text, unless it is given."""
    return "\n".join(wrap_text(text, label, " " * (len(label) if indent is None else indent)))


def bytes_text(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def short_count(count: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def duration_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
