"""The best job of a sweep, by one rule for leaderboards, `init_from=SWEEP` and `run=SWEEP`.

The number of a job is the evaluation loss of exactly the weights in its `model/`. A point, all jobs that differ only in
their seed, has the mean of its jobs' numbers, and is ranked only if all of them are completed; seeds that the sweep
itself has added count once they are. Jobs whose numbers measure different things have no best one. Jobs that were
judged on too few rows are not ranked; where a job has to be chosen, it is that with the lowest number, and a note says
what that is worth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, print_note
from common.guarded_files import check_own_files
from runner.diagnostics.symptoms import FEW_ROWS, few_rows, finite_number
from runner.run_dir.contents import read_sweep_file
from runner.run_dir.metadata import RunMetadata

SEED_KEY = "seed"
EVALUATION_PARTS = {
    "on": "rows of another kind",
    "data": "different evaluation rows",
    "rows": "different evaluation rows",
    "tokenizer": "different tokenizers",
}


@dataclass(frozen=True)
class ModelScore:
    """What is known of the weights in `model/` of a completed run."""

    weights: str  # best or last
    step: int
    loss: float | None  # of the evaluation of exactly these weights; None: not evaluated

    def __str__(self) -> str:
        return f"{self.weights} weights, step {self.step}" + (
            "" if self.loss is None else f", evaluation loss {self.loss:.4f}"
        )


def model_score(fields: Mapping[str, Any]) -> ModelScore | None:
    """Return the score of a completed run from its run.json (`fields`); None for one without a `model/`."""
    export = fields.get("export")
    if fields.get("status") != "completed" or not export:
        return None
    return ModelScore(
        str(export.get("weights")), int(finite_number(export.get("step")) or 0), finite_number(export.get("loss"))
    )


def find_best_job(sweep: Path) -> Path:
    """Return the run directory of the best job.

    Prints which it is. Raises UserError if no job can be called the best, or its directory is a link.
    """
    jobs = _read_jobs(sweep)
    scored = {
        name: score.loss
        for name, _, fields in jobs
        if (score := model_score(fields)) and score.loss is not None and (sweep / name / "model").is_dir()
    }
    points: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, swept, _ in jobs:
        points.setdefault(point_of(swept), []).append(name)
    ranked = {point: names for point, names in points.items() if all(name in scored for name in names)}
    if not ranked:
        message = "this sweep has no best job: no point has completed jobs that were evaluated"
        raise UserError(
            message,
            sweep,
            f"name a job: {sweep}/<job>; resume={sweep} continues the sweep, resume={sweep}/<job> writes a deleted model/ again",
        )
    fields_of = {name: fields for name, _, fields in jobs}
    evaluations = [fields_of[name].get("evaluation") for names in ranked.values() for name in names]
    if problem := _difference(evaluations):
        raise UserError(
            f"this sweep has no best job: its jobs were judged {problem}", sweep, f"name a job: {sweep}/<job>"
        )
    best = min(
        ranked,
        key=lambda point: (statistics.fmean(scored[name] for name in ranked[point]), swept_sort_key(dict(point))),
    )
    name = min(ranked[best], key=lambda name: scored[name])
    check_own_files(sweep, (), shallow=(name,))
    remaining = sum(name not in scored for name, _, _ in jobs)
    suffix = f"; {remaining} of {len(jobs)} jobs have no evaluated model" if remaining else ""
    chosen = f"{name}, {model_score(fields_of[name])}{suffix}"
    if len(ranked) > 1 and (problem := few_rows_problem(evaluations)):
        print_note(
            f"warning: {sweep} has no best job, its jobs were judged {problem}; the one with the lowest loss is taken: {chosen}"
        )
    else:
        print_note(f"{sweep}: best job {chosen}")
    return sweep / name


def comparison_problem(evaluations: Iterable[Any]) -> str | None:
    """Return how runs were judged if their losses do not rank them, e.g. `with different tokenizers`, `on 1 row: ...`;
    None if they do.

    `evaluations`: field `evaluation` of each run.json; what is no object (an older version, no evaluation) is skipped.
    """
    evaluations = list(evaluations)
    return _difference(evaluations) or few_rows_problem(evaluations)


def few_rows_problem(evaluations: Iterable[Any]) -> str | None:
    """Return on how many rows runs were judged if these are too few to tell the runs apart; None if they are enough, or
    not known.
    """
    count = few_rows(fewest_rows(evaluations))
    return (
        count
        and f"on {count}: not told apart, at least {FEW_ROWS} validation rows are needed (data.val_fraction, data.val_path)"
    )


def fewest_rows(evaluations: Iterable[Any]) -> int:
    """Return the smallest number of rows that a run was judged on; 0 if none is known."""
    return min(
        (
            max(1, rows)
            for evaluation in evaluations
            if isinstance(evaluation, dict) and isinstance(rows := evaluation.get("rows"), int)
        ),
        default=0,
    )


def _difference(evaluations: Iterable[Any]) -> str | None:
    """Return what the losses of runs do not have in common, so that they cannot be compared; None if nothing."""
    known = [evaluation for evaluation in evaluations if isinstance(evaluation, dict)]
    for part, text in EVALUATION_PARTS.items():
        if any(evaluation.get(part) != known[0].get(part) for evaluation in known):
            return f"with {text}"
    losses = [loss if isinstance(loss := evaluation.get("loss"), dict) else {} for evaluation in known]
    differing = sorted(
        {key for loss in losses for key in loss.keys() | losses[0].keys() if loss.get(key) != losses[0].get(key)}
    )
    if differing:
        return f"with different losses: {', '.join(differing)} differs"
    if any(evaluation.get("tokens") != known[0].get("tokens") for evaluation in known):
        return "with different tokens: data.max_length cuts the evaluation rows"
    return None


def point_of(swept: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the swept values without the seed, in any order of the keys the same."""
    return tuple(sorted((key, value) for key, value in swept.items() if key != SEED_KEY))


def is_added_seed(overrides: Mapping[str, str], swept: Mapping[str, Any]) -> bool:
    """Whether the sweep itself has added the job: its seed is not one of the values that are `swept`."""
    known = swept.get(SEED_KEY)
    return SEED_KEY in overrides and overrides[SEED_KEY] not in (known if isinstance(known, list) else ())


def swept_sort_key(values: Mapping[str, str]) -> list[tuple[float, str]]:
    """Order by swept values: numbers by size, other text alphabetically."""
    return [(parse_number(value) or 0.0, value) for value in values.values()]


def parse_number(text: str) -> float | None:
    """Return the finite number that an override's value spells, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_jobs(sweep: Path) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Return (name, swept values, fields of run.json) of each job.

    A name that leads out of the sweep directory is left out.
    """
    found = []
    fields = read_sweep_file(sweep)
    for job in fields["jobs"]:
        name, swept = job["name"], job["overrides"]
        if name and name not in (".", "..") and not {"/", "\0"} & set(name):
            run = RunMetadata.read(sweep / name)
            if run.get("status") in ("completed", "failed") or not is_added_seed(swept, fields["swept"]):
                found.append((name, swept, run))
    return found
