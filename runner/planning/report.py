"""A plan as text of at most 80 columns, and as JSON values."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from typing import Any

from runner.planning.alternatives import Alternative
from runner.planning.estimate import RunPlan
from runner.tracking.console.bar import LINE_WIDTH

LABEL = 20
GIB, MIB = 2**30, 2**20


def plan_text(plan: RunPlan) -> str:
    """Return the page of one run."""
    sections = [_model_lines(plan), _data_lines(plan), _memory_lines(plan), _time_lines(plan), _disk_lines(plan)]
    lines = ["\n".join(section) for section in sections]
    lines += ["\n".join(_wrapped("note: ", note) for note in plan.notes)] if plan.notes else []
    return "\n\n".join([*lines, verdict_text(plan)])


def sweep_text(plans: list[RunPlan], trials: int) -> str:
    """Return a table of the jobs of a sweep, their effective settings, and the total."""
    header = f"{'job':>3}  {'steps':>7}  {'tokens':>8}  {'memory':>9}  {'disk':>9}  {'time':>9}  fits"
    lines = [header]
    for number, plan in enumerate(plans):
        time = "" if plan.seconds is None else duration_text(plan.seconds)
        cells = f"{plan.steps:>7,}  {short_count(plan.data.run_tokens):>8}  {bytes_text(plan.needed_memory):>9}  {bytes_text(plan.disk.total):>9}  {time:>9}"
        lines.append(f"{number:>3}  {cells}  {'yes' if fits(plan) else 'no'}")
        lines += textwrap.wrap(
            ", ".join(plan.run.overrides),
            LINE_WIDTH,
            initial_indent=" " * 5,
            subsequent_indent=" " * 5,
            break_on_hyphens=False,
        )
    times = [plan.seconds for plan in plans if plan.seconds is not None]
    tokens = trials * sum(plan.data.run_tokens for plan in plans)
    disk = trials * sum(plan.disk.total for plan in plans)
    total = f"total of {trials * len(plans)} jobs: {short_count(tokens)} tokens, {bytes_text(disk)} of disk"
    if len(times) == len(plans):
        total += f", {duration_text(trials * sum(times))} one after the other"
    lines += ["", *textwrap.wrap(total, LINE_WIDTH)]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    lines += ["", *(_wrapped("note: ", note) for note in notes)] if notes else []
    failing = [number for number, plan in enumerate(plans) if not fits(plan)]
    if disk > plans[0].machine.free_disk:
        lines += [
            "",
            _wrapped(
                "does not fit: ",
                f"{bytes_text(disk)} of disk are needed, {bytes_text(plans[0].machine.free_disk)} are free",
            ),
        ]
    elif not failing:
        lines += ["", f"fits: every job, alone, on {plans[0].machine.device_name}"]
    for number in failing:
        lines += ["", f"job {number}: " + verdict_text(plans[number])]
    return "\n".join(lines)


def verdict_text(plan: RunPlan) -> str:
    machine, needed = plan.machine, plan.needed_memory
    where = f"{bytes_text(needed)} of {bytes_text(machine.memory)} memory, {bytes_text(plan.disk.total)} of {bytes_text(machine.free_disk)} free disk"
    if fits(plan):
        return _wrapped("fits: ", where)
    lines = [_wrapped("does not fit: ", where)]
    if not plan.fits_disk:
        lines.append(
            _wrapped(
                "  ",
                "less disk: train.keep_checkpoints=2 train.keep_every=0, or start on another disk: hydra.run.dir=DIR",
            )
        )
    if plan.alternatives:
        lines.append("with these overrides:")
        lines += [line for alternative in plan.alternatives for line in _alternative_lines(alternative)]
    if plan.alternatives and not any(alternative.fits for alternative in plan.alternatives):
        lines.append("  none is enough: a smaller model (model=...), or a shorter data.max_length")
    return "\n".join(lines)


def fits(plan: RunPlan) -> bool:
    return plan.fits_memory and plan.fits_disk


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
        "fits": fits(plan),
        "alternatives": [dataclasses.asdict(alternative) for alternative in plan.alternatives],
        "notes": plan.notes,
    }


def _model_lines(plan: RunPlan) -> list[str]:
    facts, cfg = plan.model, plan.run.config
    lines = (
        _line("run", plan.run.name)
        + _line("weights from", cfg.init_from)
        + _line("model", f"{cfg.model.name}, {facts.parameters:,} parameters")
    )
    if facts.trained != facts.parameters:
        lines += _line("trained", f"{facts.trained:,} parameters ({facts.trained / facts.parameters:.1%})")
    if facts.active != facts.parameters:
        lines += _line("active per token", f"{facts.active:,} parameters")
    return lines


def _data_lines(plan: RunPlan) -> list[str]:
    data, cfg = plan.data, plan.run.config
    kind = "packed sequences" if data.shape.is_packed else "rows"
    lines = _line("rows per epoch", f"{data.rows:,}, {data.held_out:,} more held out; {data.tokens:,} tokens")
    lines += _line(
        "step", f"{data.sequences_per_step:,} {kind} in {_plural(data.micro_batches, 'micro-batch', 'micro-batches')}"
    )
    lines += _line("longest micro-batch", f"{data.shape.rows} x {data.shape.tokens} tokens")
    done = f", {plan.run.done:,} of them done" if plan.run.done else ""
    lines += _line("steps", f"{data.steps:,} ({data.epochs:.2f} epochs, {data.run_tokens:,} tokens){done}")
    if data.lost_tokens:
        fix = f"; data.max_length={data.keeping_length} keeps 99 %" if data.keeping_length > cfg.data.max_length else ""
        lines += _line("loss tokens cut off", f"{data.lost_tokens:,} ({data.lost_share:.1%}){fix}")
    return lines


def _memory_lines(plan: RunPlan) -> list[str]:
    memory = plan.memory
    lines = [*_line("memory", f"{plan.machine.device_name}, largest: {memory.moment}")]
    lines += [f"  {name:<{LABEL}}{size / GIB:9.3f} GiB" for name, size in memory.parts.items()]
    lines.append(
        f"  {'total':<{LABEL}}{memory.total / GIB:9.3f} GiB" + (f" x {plan.ranks} ranks" if plan.ranks > 1 else "")
    )
    if plan.trial is not None:
        lines.append(f"  {'measured in trial':<{LABEL}}{plan.trial['peak_bytes'] / GIB:9.3f} GiB")
    return lines


def _time_lines(plan: RunPlan) -> list[str]:
    trial = plan.trial
    if trial is None or plan.seconds is None:
        return _line("time", "not measured")
    rate = trial["step_tokens"] / trial["step_seconds"]
    lines = _line("time", f"{duration_text(plan.seconds)} for {plan.steps:,} steps; compile {trial['compile']}")
    parts = {
        "first step": trial["first_step_seconds"],
        "longest step": trial["step_seconds"],
        "evaluation": trial["eval_seconds"],
    }
    parts |= {"samples": trial["sample_seconds"], "save": trial["save_seconds"]}
    lines += [f"  {name:<{LABEL}}{seconds:9.3f} s" for name, seconds in parts.items() if seconds]
    return [*lines, f"  {'tokens per second':<{LABEL}}{rate:9,.0f}"]


def _disk_lines(plan: RunPlan) -> list[str]:
    disk = plan.disk
    checkpoints = f"{_plural(disk.checkpoints, 'checkpoint', 'checkpoints')} of {bytes_text(disk.checkpoint)}"
    best = f", best weights {bytes_text(disk.best)}" if disk.best else ""
    return _line(
        "disk",
        f"{bytes_text(disk.total)}: {checkpoints}{best}, model/ {bytes_text(disk.export)}, logs {bytes_text(disk.logs)}",
    )


def _alternative_lines(alternative: Alternative) -> Iterable[str]:
    size = f"  {bytes_text(alternative.memory):>9} {'fits' if alternative.fits else '    '}  "
    text = alternative.overrides + (f" ({alternative.changes})" if alternative.changes else "")
    rows = textwrap.wrap(text, LINE_WIDTH - len(size), break_on_hyphens=False)
    return [(size if number == 0 else " " * len(size)) + line for number, line in enumerate(rows)]


def _line(label: str, text: str) -> list[str]:
    return textwrap.wrap(f"{label:<{LABEL}}{text}", LINE_WIDTH, subsequent_indent=" " * LABEL, break_on_hyphens=False)


def _plural(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(
        text, LINE_WIDTH, initial_indent=label, subsequent_indent=" " * min(len(label), 6), break_on_hyphens=False
    )


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
