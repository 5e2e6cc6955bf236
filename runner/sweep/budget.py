"""What the jobs of a sweep have in common where their optimizer steps hold different numbers of rows. Arithmetic on configs only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from common.errors import UserError
from runner.engine.config import Config

ROW_KEYS = ("train.batch_size", "train.accumulation_steps", "distributed.nproc", "distributed.nnodes")
TOLERANCE = 0.01  # relative difference of the rows of two jobs that rounding may leave without a warning
# Counted in steps: they shrink where a step grows, so that the curves of all jobs have their points at the same tokens.
INTERVAL_KEYS = ("train.log_every", "train.eval_every", "train.save_every", "train.sample_every", "train.keep_every", "schedule.warmup_steps")


def rows_per_step(config: Config) -> int:
    """Return the rows of an optimizer step. distributed.nproc=auto counts as one rank: it is the same number for every job."""
    ranks = config.distributed.nnodes * (1 if config.distributed.nproc == "auto" else int(config.distributed.nproc))
    return config.train.batch_size * config.train.accumulation_steps * ranks


def resolve_budget_rule(match_budget: str, swept: Iterable[str]) -> str:
    """Return what sweep.match_budget means for a sweep over the keys `swept`: tokens, steps or epochs."""
    if match_budget != "auto":
        return match_budget
    return "tokens" if set(ROW_KEYS) & set(swept) else "epochs"


def matching_overrides(config: Config, base_rows: int, rule: str) -> dict[str, str]:
    """Return the overrides that give a job the same budget as one with `base_rows` rows per step. Raises UserError if `rule` cannot be kept."""
    rows, train = rows_per_step(config), config.train
    if rows == base_rows:
        return {}
    if rule == "steps" and not train.max_steps:
        raise UserError(
            "sweep.match_budget=steps needs train.max_steps: without it the epochs set the number of steps",
            "sweep.match_budget=steps",
            "add train.max_steps=N, or sweep.match_budget=tokens",
        )
    if rule == "epochs" and train.max_steps:
        raise UserError(
            "sweep.match_budget=epochs needs train.max_steps=0: otherwise max_steps sets the length",
            f"sweep.match_budget=epochs train.max_steps={train.max_steps}",
            "add train.max_steps=0, or sweep.match_budget=tokens",
        )
    scaled_keys = () if rule == "steps" else [key for key in ("train.max_steps", *INTERVAL_KEYS) if _value(config, key)]
    overrides = {key: str(max(1, round(_value(config, key) * base_rows / rows))) for key in scaled_keys}
    if config.sweep.lr_scale != "none":
        ratio = rows / base_rows
        overrides["optimizer.lr"] = repr(config.optimizer.lr * (ratio if config.sweep.lr_scale == "linear" else math.sqrt(ratio)))
    return overrides


def budget_warning(configs: Iterable[Config], base_rows: int, swept: Iterable[str]) -> str | None:
    """Return a line about jobs that should see the same rows and cannot, because steps are whole; None if there are none."""
    matched = [config for config in configs if config.train.max_steps and resolve_budget_rule(config.sweep.match_budget, swept) == "tokens"]
    for length in sorted({config.train.max_steps for config in matched}):  # jobs of different max_steps differ on purpose
        steps = {
            rows_per_step(config): int(matching_overrides(config, base_rows, "tokens").get("train.max_steps", length))
            for config in matched
            if config.train.max_steps == length
        }
        totals = {rows: rows * count for rows, count in sorted(steps.items())}
        if max(totals.values()) > min(totals.values()) * (1 + TOLERANCE):
            terms = ", ".join(f"{steps[rows]} x {rows} = {total}" for rows, total in totals.items())
            return f"the jobs do not see the same number of rows (steps x rows per step: {terms}): train.max_steps={length} cannot be divided evenly"
    return None


def warn_if_unequal(configs: Iterable[Config], base_rows: int, swept: Iterable[str]) -> None:
    if warning := budget_warning(configs, base_rows, swept):
        print(f"warning: {warning}", file=sys.stderr)


def _value(config: Config, key: str) -> int:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
