"""What a sweep says at its end: the best point, how sure that is, whether it is at the edge of a range, the commands that
come next; the effect of each swept setting, and which settings explain the differences of the loss.

The effect of a setting: mean, spread and best loss of the points with each of its values. Which settings explain the
differences: Optuna's fANOVA (Hutter et al., 2014, An efficient approach for assessing hyperparameter importance), where
Optuna is installed and there are enough completed jobs.
"""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import getitem
from typing import TYPE_CHECKING

from common.errors import UserError, one_line
from common.paths import command_line
from runner.reporting.columns import loss_text
from runner.reporting.runs import longer_override
from runner.reporting.statistics import mean_std
from runner.reporting.sweep_results import (
    KEEP,
    JobResult,
    ResultRow,
    SweepResults,
    point_label,
)
from runner.run_dir.best_job import SEED_KEY, fewest_rows, parse_number
from runner.run_dir.saved_config import load_literal_config
from runner.tracking.data_report import listed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# two neighbouring values further apart than this are continued by their ratio, others by their difference
GEOMETRIC_RATIO = 1.5
MAX_RATIO = 10  # of the proposed value to the edge: the values of a wide sweep may be many powers of ten apart
MAX_VALUES = 40  # of the table of a setting; with more, of a study, the chart alone shows them


@dataclass(frozen=True)
class RangeEdge:
    """The best point has the lowest or highest value of a swept setting: a better one may lie outside of the range."""

    key: str
    value: str
    side: str  # lowest or highest
    following: str  # the next value outside
    command: str  # sweeps it; empty where the sweep cannot take it

    def __str__(self) -> str:
        return f"the best point has the {self.side} {self.key} of the sweep ({self.value}): a better one may be outside of the range"


class SweepVerdict:
    """The best point of a sweep, how sure that is, and the command lines that come next: empty where there is none."""

    def __init__(self, sweep: SweepResults) -> None:
        ranked, job = sweep.ranked, sweep.best
        self.winner = ranked[0] if ranked else None  # the point with the lowest loss; None: no point is ranked
        self.job = job  # of the winner: that with the lowest loss
        # ranked points whose difference to the winner may be chance
        self.ties = [row for row in ranked[1:] if row.rank == 1]
        self.judged_on = _judged_on(sweep)  # e.g. `90 validation rows, 3 seeds per point`
        self.is_sure = False  # whether the winner differs from every other point by more than chance
        self.train_longer = ""  # trains `job` further; empty where a resume would end at once
        self.repeat = ""  # repeats the winner with three seeds; empty where the sweep has seeds
        self.transfer = ""  # trains the wide model of sweep.transfer
        self.command_note = ""  # what the commands of the winner leave out of its overrides
        self.edges: list[RangeEdge] = []
        # `certainty`, a sentence: how sure it is that the winner is better than the others, or why there is none
        if self.winner is None or job is None:
            unranked = "no point has all of its jobs completed and evaluated" if sweep.jobs else "the sweep has no jobs"
            self.certainty = f"no winner: {sweep.problem or unranked}"
            return
        unknown = [row for row in ranked[1:] if row.rank != 1 and not row.differs]
        self.certainty = _certainty(sweep, ranked, self.ties, unknown)
        self.is_sure = len(ranked) > 1 and not self.ties and not unknown
        self.train_longer = _train_longer(job)
        if len(ranked) > 1 and len(self.winner.jobs) == 1 and KEEP not in job.launches[-1]:
            self.repeat = f"{sweep.job_command(job)} --multirun seed=1,2,3"
        self.transfer = sweep.transfer_command(job)
        self.command_note = sweep.command_note(job)
        if not self.ties:  # else another point may be the best one
            self.edges = [edge for key in sweep.swept_keys if (edge := _range_edge(sweep, self.winner, key))]

    @property
    def name(self) -> str:
        """The settings of the winner, e.g. `optimizer.lr=0.001`; its folder where only the seed was swept."""
        return (point_label(self.winner.overrides) or (self.job.name if self.job else "")) if self.winner else ""


def _judged_on(sweep: SweepResults) -> str:
    """Return on how many rows and seeds the completed points are judged; empty before the first."""
    rows = [row for row in sweep.rows if row.score and row.status == "completed"]
    seeds = sorted({row.score.n for row in rows if row.score})
    count = fewest_rows(job.evaluation for row in rows for job in row.jobs)
    kind = {"training-rows": "training"}.get(sweep.ranked_by, sweep.ranked_by)
    numbers = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else "".join(map(str, seeds))
    per_point = f"{numbers} seed{'s' * (seeds != [1])} per point" if seeds else ""
    return ", ".join(filter(None, [f"{count} {kind} row{'s' * (count > 1)}" if count else "", per_point]))


def _certainty(sweep: SweepResults, ranked: list[ResultRow], ties: list[ResultRow], unknown: list[ResultRow]) -> str:
    unfinished = sum(row.status in ("running", "interrupted", "new") for row in sweep.rows)
    suffix = f"; {unfinished} of {len(sweep.rows)} points are not finished" if unfinished else ""
    if paused := sum(row.status == "paused" for row in sweep.rows):
        suffix += f"; {paused} of {len(sweep.rows)} points are paused"
    if len(ranked) == 1 and paused:
        return f"the only point that was trained to its end{suffix}"
    if len(ranked) == 1:
        return f"only one point has a result: there is nothing to compare it with{suffix}"
    first, second = ranked[0].score, ranked[1].score
    assert first and second
    others = f"{len(ties)} other point{'s' * (len(ties) != 1)}"
    gap = f"{second.mean - first.mean:.4f} below the second best ({point_label(ranked[1].overrides)}: {loss_text(second)})"
    if ties and first.deviation is None:
        best = ranked[0].jobs[0]
        of_trunk = ", that of the trunk: training on made none better"
        is_trunk = best.model is not None and best.began.endswith(f" at step {best.model.step:,}")
        return f"no winner: {others} {'has' if len(ties) == 1 else 'have'} the same loss{of_trunk * is_trunk}{suffix}"
    if ties:
        names = listed([point_label(row.overrides) for row in ties], 3)
        return f"no clear winner: {others} ({names}) {'does' if len(ties) == 1 else 'do'} not differ from the best at 95 % over {first.n} seeds{suffix}"
    if len(unknown) == len(ranked) - 1:
        return f"{gap}; one seed per point: how much of that is chance is not known{suffix}"
    compared = "every other point"
    if unknown:
        compared = f"the {len(ranked) - 1 - len(unknown)} of {len(ranked) - 1} other points with enough seeds"
    return f"{gap}; better than {compared} at 95 % over {first.n} seeds (Welch's t interval of each difference){suffix}"


def _train_longer(job: JobResult) -> str:
    """Return the command that doubles the length of a job; empty if train.patience has ended it, or its config cannot
    be read.
    """
    settings, last = job.settings, job.metrics.last
    steps = parse_number(settings.get("train.max_steps", "")) or 0
    if parse_number(settings.get("train.patience", "")) and (not steps or last is None or last.step < steps):
        return ""
    longer = longer_override(settings)
    return shlex.join([*command_line("train"), f"resume={job.run_dir}", longer]) if longer else ""


def _range_edge(sweep: SweepResults, winner: ResultRow, key: str) -> RangeEdge | None:
    """Return the edge at which the winner is in one numeric key; None inside of the range, and at a bound that the
    setting itself has.
    """
    found = {row.overrides[key]: parse_number(row.overrides[key]) for row in sweep.rows if key in row.overrides}
    values = sorted({value for value in found.values() if value is not None})
    own = found.get(winner.overrides.get(key, ""))
    if own is None or None in found.values() or len(values) < 2 or own not in (values[0], values[-1]):
        return None
    side, neighbour = ("highest", values[-2]) if own == values[-1] else ("lowest", values[1])
    following = next_value(own, neighbour, is_whole=all(text.lstrip("+-").isdecimal() for text in found))
    if following is None or not _is_allowed(winner.jobs[0], key, following):
        return None
    text = str(following) if isinstance(following, int) else f"{following:g}"
    return RangeEdge(key, winner.overrides[key], side, text, _extend_command(sweep, key, text))


def next_value(edge: float, neighbour: float, is_whole: bool) -> float | int | None:
    """Return the value that continues the row neighbour, edge: by their ratio, at most MAX_RATIO, or their difference;
    None if that leaves the sign of the values.
    """
    small, large = sorted((abs(edge), abs(neighbour)))
    is_ratio = edge * neighbour > 0 and large >= GEOMETRIC_RATIO * small
    value = edge * min(MAX_RATIO, max(1 / MAX_RATIO, edge / neighbour)) if is_ratio else 2 * edge - neighbour
    value = float(f"{value:.3g}")
    if edge >= 0 and neighbour >= 0 and value <= 0:
        return None
    if not is_whole:
        return value
    return int(value) if value == int(value) and value != edge else None


def _is_allowed(job: JobResult, key: str, value: float) -> bool:
    """Whether the dataclass of the setting's section takes `value` beside the other settings of the job.

    True where the config cannot be read.
    """
    from runner.config.compose import section_object

    *sections, name = key.split(".")
    if not sections or job.run_dir is None:
        return True
    try:
        config = load_literal_config(job.run_dir)
        reduce(getitem, sections, config)[name] = value
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return True
    try:
        section_object(sections[0], config[sections[0]])
    except (UserError, ValueError, TypeError, KeyError):
        return False
    return True


def _extend_command(sweep: SweepResults, key: str, value: str) -> str:
    """Return the command that adds the value to the sweep; empty where the sweep cannot take it: a study of Optuna, and
    a key of sweep.zip.
    """
    zipped = next((override for override in sweep.shared_overrides if override.startswith("sweep.zip=")), "")
    if sweep.sweeper == "optuna" or key in re.split(r"[^\w./@]+", zipped) or not math.isfinite(float(value)):
        return ""
    return shlex.join([*command_line("train"), f"resume={sweep.folder}", f"{key}={value}"])


class ValueEffect:
    """The losses of the jobs with one value of a setting."""

    def __init__(self, sweep: SweepResults, key: str, value: str) -> None:
        jobs = [job for job in sweep.jobs if job.swept.get(key) == value]
        losses = [loss for job in jobs if (loss := job_loss(sweep, job)) is not None]
        self.value = value
        self.loss = mean_std(losses)  # over the completed jobs that have one
        self.failed = sum(job.status == "failed" or job.diverged for job in jobs)
        self.best = min(losses, default=None)


@dataclass(frozen=True)
class SettingEffect:
    key: str
    values: list[ValueEffect]  # numbers by size, other text alphabetically

    @property
    def has_table(self) -> bool:
        return len(self.values) <= MAX_VALUES

    @property
    def spread(self) -> float | None:
        """Difference of the highest and the lowest mean over at least two jobs."""
        means = [value.loss.mean for value in self.values if value.loss and value.loss.n > 1]
        return max(means) - min(means) if len(means) > 1 and self.has_table else None


def setting_effects(sweep: SweepResults) -> list[SettingEffect]:
    """Return the effects of the settings with two and more values, the largest difference of means first."""
    effects = [
        SettingEffect(key, [ValueEffect(sweep, key, value) for value in sorted_values(sweep, key)])
        for key in sweep.compared_keys
    ]
    return sorted(
        (effect for effect in effects if len(effect.values) > 1),
        key=lambda effect: (effect.key == SEED_KEY, -(effect.spread or 0.0)),
    )


def sorted_values(sweep: SweepResults, key: str) -> list[str]:
    values = dict.fromkeys(job.swept[key] for job in sweep.jobs if key in job.swept)
    return sorted(values, key=lambda value: (parse_number(value) is None, parse_number(value) or 0.0, value))


def job_loss(sweep: SweepResults, job: JobResult) -> float | None:
    """Return the loss that a completed job is compared by; None for the others, and where the jobs cannot be compared."""
    return (
        job.score(sweep.ranked_by) if job.status == "completed" and not job.diverged and sweep.problem is None else None
    )


TREES = 32  # of the forest; with 64 the shares of 200 jobs differ by less than 0.02, after 1.5 times the seconds
MIN_JOBS = 10  # completed ones; a forest over fewer points mostly shows which of them were drawn
PACKAGES = ("optuna", "sklearn")
MAX_SWEPT_VALUE = 1e30  # scikit-learn computes in float32
LOG_RATIO = 10.0  # positive values that span more are taken by their logarithm
Point = tuple[tuple[tuple[str, str], ...], float]  # (swept values, loss)


@dataclass(frozen=True)
class Importance:
    """Shares of the variance of the loss by setting, largest first; they sum to 1.

    Empty, with the reason, where they cannot be calculated.
    """

    shares: list[tuple[str, float]] = field(default_factory=list)
    jobs: int = 0
    reason: str = ""


def setting_importance(sweep: SweepResults) -> Importance:
    losses = [(job.swept, loss) for job in sweep.jobs if (loss := job_loss(sweep, job)) is not None]
    varied = [key for key in sweep.compared_keys if len({swept.get(key) for swept, _ in losses}) > 1]
    complete = [(swept, loss) for swept, loss in losses if all(key in swept for key in varied)]
    if len(varied) < 2:
        return Importance(reason="it needs two settings with several values among the completed jobs")
    if len(complete) < MIN_JOBS:
        return Importance(reason=f"it needs {MIN_JOBS} completed jobs, there are {len(complete)}")
    if len({loss for _, loss in complete}) < 2:
        return Importance(reason="all completed jobs have the same loss")
    for swept, _ in complete:
        for key in varied:
            if abs(parse_number(swept[key]) or 0) > MAX_SWEPT_VALUE:
                reason = f"{key}={swept[key]} is beyond {MAX_SWEPT_VALUE:g}, up to which it is computed"
                return Importance(reason=reason)
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        packages = " ".join({"sklearn": "scikit-learn"}.get(name, name) for name in missing)
        return Importance(reason=f"a package is missing: pip install {packages}, then report.py sweep={sweep.folder}")
    return _fanova(tuple((tuple((key, swept[key]) for key in varied), loss) for swept, loss in complete))


@lru_cache(maxsize=4)
def _fanova(points: tuple[Point, ...]) -> Importance:
    """Return fANOVA of a random forest with a fixed seed."""
    import optuna

    distributions = {key: _distribution([dict(swept)[key] for swept, _ in points]) for key, _ in points[0][0]}
    is_float = {key: isinstance(each, optuna.distributions.FloatDistribution) for key, each in distributions.items()}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study()
        for swept, loss in points:
            params = {key: parse_number(value) if is_float[key] else value for key, value in swept}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=loss))
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, seed=0)
        )
    except ValueError as error:  # values that Optuna or scikit-learn cannot take
        return Importance(reason=f"it cannot be computed from these values: {one_line(str(error))}")
    finally:
        optuna.logging.set_verbosity(verbosity)
    return Importance([(key, float(share)) for key, share in shares.items()], len(points))


def _distribution(values: list[str]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = [number for value in values if (number := parse_number(value)) is not None]
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted(set(values)))
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=low > 0 and high > LOG_RATIO * low)
