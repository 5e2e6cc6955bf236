"""The effect of each swept setting: mean, spread and best loss of the points with each of its values."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from runner.inference.best_job import SEED_KEY, parse_number
from runner.reporting.sweep_results.results import JobResult, SweepResults

MAX_VALUES = 40  # of the table of a setting; with more, of a study, the chart alone shows them


@dataclass(frozen=True)
class ValueEffect:
    value: str
    jobs: int  # completed, with a loss
    failed: int  # failed or diverged
    mean: float | None
    deviation: float | None  # sample standard deviation over the jobs; None for fewer than two
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
        means = [value.mean for value in self.values if value.mean is not None and value.jobs > 1]
        return max(means) - min(means) if len(means) > 1 and self.has_table else None


def setting_effects(sweep: SweepResults) -> list[SettingEffect]:
    """Return the effects of the settings with two and more values, the largest difference of means first."""
    keys = [*sweep.swept_keys, *([SEED_KEY] if sweep.has_seeds else [])]
    effects = [SettingEffect(key, [_value_effect(sweep, key, value) for value in sorted_values(sweep, key)]) for key in keys]
    return sorted((effect for effect in effects if len(effect.values) > 1), key=lambda effect: (effect.key == SEED_KEY, -(effect.spread or 0.0)))


def sorted_values(sweep: SweepResults, key: str) -> list[str]:
    values = dict.fromkeys(job.swept[key] for job in sweep.jobs if key in job.swept)
    return sorted(values, key=lambda value: (parse_number(value) is None, parse_number(value) or 0.0, value))


def job_loss(sweep: SweepResults, job: JobResult) -> float | None:
    """Return the loss that a completed job is compared by; None for the others, and where the jobs cannot be compared."""
    return job.score(sweep.ranked_by) if job.status == "completed" and not job.diverged and sweep.problem is None else None


def _value_effect(sweep: SweepResults, key: str, value: str) -> ValueEffect:
    jobs = [job for job in sweep.jobs if job.swept.get(key) == value]
    losses = [loss for job in jobs if (loss := job_loss(sweep, job)) is not None]
    deviation = statistics.stdev(losses) if len(losses) > 1 else None
    failed = sum(job.status == "failed" or job.diverged for job in jobs)
    return ValueEffect(value, len(losses), failed, statistics.fmean(losses) if losses else None, deviation, min(losses, default=None))
