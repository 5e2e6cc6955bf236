"""The effect of each swept setting, and which settings explain the differences of the loss.

The effect of each swept setting: mean, spread and best loss of the points with each of its values.

Which swept settings explain the differences of the loss: Optuna's fANOVA (Hutter et al., 2014, An efficient approach
for assessing hyperparameter importance), where Optuna is installed and there are enough completed jobs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from common.errors import one_line
from runner.reporting.sweep_results import JobResult, MeanStd, SweepResults, mean_std
from runner.run_dir.best_job import SEED_KEY, parse_number

MAX_VALUES = 40  # of the table of a setting; with more, of a study, the chart alone shows them


@dataclass(frozen=True)
class ValueEffect:
    value: str
    loss: MeanStd | None  # over the completed jobs that have one
    failed: int  # jobs that failed or diverged
    best: float | None


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
        SettingEffect(key, [_value_effect(sweep, key, value) for value in sorted_values(sweep, key)])
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


def _value_effect(sweep: SweepResults, key: str, value: str) -> ValueEffect:
    jobs = [job for job in sweep.jobs if job.swept.get(key) == value]
    losses = [loss for job in jobs if (loss := job_loss(sweep, job)) is not None]
    failed = sum(job.status == "failed" or job.diverged for job in jobs)
    return ValueEffect(value, mean_std(losses), failed, min(losses, default=None))


if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

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

    keys = [key for key, _ in points[0][0]]
    values = {key: [dict(swept)[key] for swept, _ in points] for key in keys}
    distributions = {key: _distribution(values[key]) for key in keys}
    numeric = {key for key in keys if all(parse_number(value) is not None for value in values[key])}
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study()
        for swept, loss in points:
            params = {key: parse_number(value) if key in numeric else value for key, value in swept}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=loss))
        shares = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, seed=0)
        )
    except ValueError as error:  # values that Optuna or scikit-learn cannot take
        return Importance(reason=f"it cannot be computed from these values: {one_line(str(error))}")
    finally:
        optuna.logging.set_verbosity(verbosity)
    return Importance(
        sorted(((key, float(share)) for key, share in shares.items()), key=lambda item: -item[1]), len(points)
    )


def _distribution(values: list[str]) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = [number for value in values if (number := parse_number(value)) is not None]
    if len(numbers) < len(values):
        return CategoricalDistribution(sorted(set(values)))
    low, high = min(numbers), max(numbers)
    return FloatDistribution(low, high, log=low > 0 and high > LOG_RATIO * low)
