"""What stays equal between the jobs of a sweep whose steps hold different numbers of rows. Pure arithmetic on one job's config."""

from __future__ import annotations

import math
from collections.abc import Iterable

from common.errors import UserError
from runner.engine.config import Config

ROW_KEYS = ("train.batch_size", "train.accumulation_steps", "distributed.nproc", "distributed.nnodes")
ROUNDING = 0.01  # of the rows of a job: what division may leave without a word
# Counted in steps: they shrink where a step grows, so that the curves of all jobs have their points at the same tokens.
INTERVAL_KEYS = ("train.log_every", "train.eval_every", "train.save_every", "train.sample_every", "train.keep_every", "schedule.warmup_steps")


def rows_per_step(config: Config) -> int:
    """Rows of an optimizer step. How many ranks `auto` is can be known only where they start: as many for each job."""
    ranks = config.distributed.nnodes * (1 if config.distributed.nproc == "auto" else int(config.distributed.nproc))
    return config.train.batch_size * config.train.accumulation_steps * ranks


def resolve_budget_rule(fix: str, swept: Iterable[str]) -> str:
    """What `sweep.match_budget` means for a sweep over these words."""
    if fix != "auto":
        return fix
    return "tokens" if set(ROW_KEYS) & set(swept) else "epochs"


def matching_overrides(config: Config, base: int, fix: str) -> dict[str, str]:
    """The words to change in a job so that it is fair beside one whose steps hold `base` rows. `fix` is what `kept` returned.

    Raises ValueError(what, where, fix) where the two cannot be made equal.
    """
    rows, train = rows_per_step(config), config.train
    if rows == base:
        return {}
    if fix == "steps" and not train.max_steps:
        raise UserError(
            "steps cannot be kept equal: their number comes from the epochs", "sweep.match_budget=steps", "add train.max_steps=N, or choose sweep.match_budget=tokens"
        )
    if fix == "epochs" and train.max_steps:
        raise UserError(
            "epochs cannot be kept equal: train.max_steps sets the length",
            f"sweep.match_budget=epochs train.max_steps={train.max_steps}",
            "set train.max_steps=0, or choose sweep.match_budget=tokens",
        )
    found = (
        {}
        if fix == "steps"
        else {word: str(_scaled(_value(config, word), base / rows)) for word in ("train.max_steps", *INTERVAL_KEYS) if _value(config, word)}
    )
    if config.sweep.lr_scale != "none":
        found["optimizer.lr"] = repr(scaled_lr(config.optimizer.lr, rows / base, config.sweep.lr_scale))
    return found


def budget_warning(configs: Iterable[Config], base: int, swept: Iterable[str]) -> str | None:
    """One line on jobs that should see the same rows and cannot: a step is not divided."""
    alike = [config for config in configs if config.train.max_steps and resolve_budget_rule(config.sweep.match_budget, swept) == "tokens"]
    for length in sorted({config.train.max_steps for config in alike}):  # one that is swept differs because it should
        jobs = {
            rows_per_step(config): matching_overrides(config, base, "tokens").get("train.max_steps", length)
            for config in alike
            if config.train.max_steps == length
        }
        seen = {rows: rows * int(steps) for rows, steps in sorted(jobs.items())}
        if max(seen.values()) > min(seen.values()) * (1 + ROUNDING):
            told = ", ".join(f"{jobs[rows]} x {rows} = {total}" for rows, total in seen.items())
            return f"the jobs do not see the same rows, steps x rows: {told}; with train.max_steps={length} there is a rest, choose another"
    return None


def scaled_lr(lr: float, ratio: float, how: str) -> float:
    """The learning rate for steps with `ratio` times the rows."""
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[how]


def _scaled(count: int, ratio: float) -> int:
    return max(1, round(count * ratio))


def _value(config: Config, word: str) -> int:
    section, name = word.split(".")
    return getattr(getattr(config, section), name)
