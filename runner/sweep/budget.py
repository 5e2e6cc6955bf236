"""What the jobs of a sweep have in common where their optimizer steps hold different numbers of tokens. Arithmetic on
configs only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter

from common.errors import UserError, print_note
from models.families.decoder import DecoderConfig
from runner.engine.config import STEP_SIZE_KEYS, Config, rows_per_step
from runner.engine.optim.config import check_mup
from runner.engine.optim.mup import WIDTH_KEYS

ROW_LENGTH_KEYS = ("data.max_length", "data.packing", "data.path", "stage.data_format")
FINAL_EVAL_ROWS = 256  # train.final_eval_rows of jobs that do not evaluate
TOLERANCE = 0.01  # relative difference of the rows or tokens of two jobs that rounding may leave without a warning
MIN_TRANSFER_WIDTH = 64  # hidden size of the narrow models of sweep.transfer without optimizer.mup_base_width
# Counted in steps: they shrink where a step grows, so that the curves of all jobs have their points at the same tokens.
INTERVAL_KEYS = (
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.sample_every",
    "train.keep_every",
    "schedule.warmup_steps",
)


@dataclass(frozen=True)
class StepSize:
    """What an optimizer step holds: batch rows, and tokens where settings alone determine them (0: they do not)."""

    rows: int
    tokens: int = 0

    def relative_to(self, base: StepSize) -> Fraction:
        """Return the size in multiples of `base`: in tokens if both are known, otherwise in rows."""
        return Fraction(self.tokens, base.tokens) if self.tokens and base.tokens else Fraction(self.rows, base.rows)


def step_size(config: Config) -> StepSize:
    """Return the size of a step.

    A packed sequence is full: it has data.max_length tokens, twice as many for a preference pair.
    """
    from data.types import sequences_per_row  # imports numpy, which other commands need not wait for

    rows = rows_per_step(config)
    length = (
        config.data.max_length * sequences_per_row(config.stage.data_format) if config.data.packing != "none" else 0
    )
    return StepSize(rows, rows * length)


def smallest_step(configs: Sequence[Config]) -> StepSize:
    """Return the smallest step of the jobs, which all others are compared with; without tokens unless they are known
    for every job.
    """
    sizes = [step_size(config) for config in configs]
    if all(size.tokens for size in sizes):
        return min(sizes, key=lambda size: size.tokens)
    return StepSize(min(size.rows for size in sizes))


def resolve_budget_rule(match_budget: str, swept: Iterable[str]) -> str:
    """Return what sweep.match_budget means for a sweep over the keys `swept`: tokens, steps or epochs."""
    if match_budget != "auto":
        return match_budget
    return "tokens" if STEP_SIZE_KEYS & set(swept) else "epochs"


def matching_overrides(config: Config, base: StepSize, swept: Iterable[str]) -> dict[str, str]:
    """Return the overrides that give a job of a sweep over the keys `swept` the same budget as one whose step is `base`.

    Raises UserError if the rule of the sweep cannot be kept.
    """
    ratio, train = step_size(config).relative_to(base), config.train
    rule = resolve_budget_rule(config.sweep.match_budget, swept)
    if ratio == 1:
        return {}
    if rule == "steps" and not train.max_steps:
        raise UserError(
            "sweep.match_budget=steps needs train.max_steps: without it the epochs set the number of steps",
            "sweep.match_budget=steps",
            "add train.max_steps=N, or sweep.match_budget=epochs",
        )
    if rule == "epochs" and train.max_steps:
        given = config.sweep.match_budget
        reason = (
            " (the meaning of auto here, because none of the swept settings is a batch size, a number of ranks or the packing)"
            if given == "auto"
            else ""
        )
        raise UserError(
            f"the steps of the jobs differ in size, and sweep.match_budget=epochs{reason} needs train.max_steps=0: otherwise max_steps sets the length",
            f"sweep.match_budget={given} train.max_steps={train.max_steps}",
            "add sweep.match_budget=steps: the same number of steps for every job; or train.max_steps=0: the same number of epochs",
        )
    scaled_keys = [] if rule == "steps" else ["train.max_steps", *INTERVAL_KEYS]
    overrides = {key: str(max(1, round(steps / ratio))) for key in scaled_keys if (steps := attrgetter(key)(config))}
    if config.sweep.lr_scale != "none":
        overrides["optimizer.lr"] = repr(
            config.optimizer.lr * (float(ratio) if config.sweep.lr_scale == "linear" else math.sqrt(ratio))
        )
    return overrides


def uncountable_reason(configs: Sequence[Config]) -> str | None:
    """Return why the tokens that the jobs see cannot be made equal by their settings; None if they can."""
    by_steps, by_epochs = (
        [config for config in configs if bool(config.train.max_steps) == limited] for limited in (True, False)
    )
    if any(config.data.packing == "none" for config in by_steps) and (
        key := _first_differing(by_steps, ROW_LENGTH_KEYS)
    ):
        return f"{key} differs and data.packing=none: the rows of the jobs have different numbers of tokens, which train.max_steps cannot balance"
    cuts = [
        config
        for config in by_epochs
        if config.data.too_long in ("drop", "truncate") or config.stage.data_format != "text"
    ]
    if key := _first_differing(
        by_epochs, ("data.path", "data.weights", "stage.data_format", *(("data.max_length",) if cuts else ()))
    ):
        return f"{key} differs and train.max_steps=0: an epoch has different numbers of tokens"
    return None


def check_countable(configs: Sequence[Config], match_budget: str, swept: Iterable[str]) -> None:
    """Refuse sweep.match_budget=tokens where tokens cannot be counted; warn where `auto` would have to.

    Other rules do not count tokens.
    """
    if resolve_budget_rule(match_budget, swept) != "tokens" or (reason := uncountable_reason(configs)) is None:
        return
    if match_budget == "tokens":
        others = {"steps" if config.train.max_steps else "epochs" for config in configs}
        fix = "data.packing=best_fit with train.max_steps=N counts tokens" + (
            f"; or sweep.match_budget={others.pop()}" if len(others) == 1 else ""
        )
        raise UserError(f"sweep.match_budget=tokens cannot be kept: {reason}", "sweep.match_budget=tokens", fix)
    print_note(f"warning: the jobs do not see the same number of tokens: {reason}")


def warn_if_unequal(configs: Iterable[Config], base: StepSize, swept: Iterable[str]) -> None:
    """Warn of jobs that should see the same rows or tokens and cannot, because steps are whole."""
    matched = [
        config
        for config in configs
        if config.train.max_steps and resolve_budget_rule(config.sweep.match_budget, swept) == "tokens"
    ]
    if base.tokens and not all(step_size(config).tokens for config in matched):
        return  # `check_countable` has warned
    unit = "tokens" if base.tokens else "rows"
    # jobs of different max_steps differ on purpose
    for length in sorted({config.train.max_steps for config in matched}):
        steps = {
            getattr(step_size(config), unit): int(
                matching_overrides(config, base, swept).get("train.max_steps", length)
            )
            for config in matched
            if config.train.max_steps == length
        }
        totals = {size: size * count for size, count in sorted(steps.items())}
        if max(totals.values()) > min(totals.values()) * (1 + TOLERANCE):
            terms = ", ".join(f"{steps[size]} x {size} = {total}" for size, total in totals.items())
            return print_note(
                f"warning: the jobs do not see the same number of {unit} (steps x {unit} per step: {terms}): train.max_steps={length} cannot be divided evenly"
            )


def evaluation_overrides(config: Config) -> dict[str, str]:
    """Return the override that gives a job without evaluations one at its end, on the same rows in every job: a loss of
    the last step would be luck.
    """
    return {} if config.evaluates or config.train.final_eval_rows else {"train.final_eval_rows": str(FINAL_EVAL_ROWS)}


def transfer_overrides(config: Config, swept: Iterable[str]) -> dict[str, str]:
    """Return the overrides that give a job the narrow version of its model that sweep.transfer asks for: heads and MLP
    as much smaller as the hidden size, at least one key/value head.

    Raises UserError where there is none, or where its learning rate would not be that of the model.
    """
    model, base, initial = config.model, config.optimizer.mup_base_width, config.init_from
    if config.sweep.transfer == "none":
        return {}
    if initial != "scratch" and (initial != "auto" or config.stage.init_from_stage):
        raise UserError(
            f"sweep.transfer=mup trains narrow models from random weights, the jobs start from init_from={initial}",
            f"sweep.transfer=mup stage={config.stage.name} init_from={initial}",
            "init_from=scratch, or sweep.transfer=none",
        )
    if resized := sorted(set(WIDTH_KEYS) & set(swept)):
        raise UserError(
            f"sweep.transfer=mup sets {resized[0]} of every job, it cannot be swept", resized[0], "sweep.transfer=none"
        )
    check_mup(replace(config.optimizer, mup_base_width=base or 1), model, config.stage.lora is not None)
    assert isinstance(model, DecoderConfig)
    heads, width = model.num_attention_heads, model.hidden_size
    narrow = {width * n // heads: n for n in range(1, heads) if width * n % heads == 0}  # hidden size -> heads
    chosen = base or min((size for size in narrow if size >= MIN_TRANSFER_WIDTH), default=0)
    if chosen not in narrow:
        widths = ", ".join(map(str, narrow))
        raise UserError(
            f"sweep.transfer=mup needs a hidden size below {width} with a whole number of heads of the same width, got {base or 'none'}",
            f"model.hidden_size={width} model.num_attention_heads={heads} optimizer.mup_base_width={base}",
            f"optimizer.mup_base_width=N, one of {widths}" if widths else "sweep.transfer=none",
        )
    sizes = {key: attrgetter(key)(config) * narrow[chosen] // heads for key in WIDTH_KEYS}
    sizes["model.num_key_value_heads"] = math.gcd(narrow[chosen], max(1, sizes["model.num_key_value_heads"]))
    return {key: str(size) for key, size in sizes.items() if size} | {"optimizer.mup_base_width": str(chosen)}


def derived_overrides(config: Config, base: StepSize, swept: Iterable[str]) -> dict[str, str]:
    """Return all that a sweep over the keys `swept` sets in a job."""
    return matching_overrides(config, base, swept) | evaluation_overrides(config) | transfer_overrides(config, swept)


def _first_differing(configs: Sequence[Config], keys: Iterable[str]) -> str | None:
    return next(
        (key for key in keys if any(attrgetter(key)(config) != attrgetter(key)(configs[0]) for config in configs)), None
    )
