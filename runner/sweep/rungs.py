"""Rungs: jobs of a search that train a first share of their steps, are compared, and continue or stay paused.

A share below 1 is a rung: the job is saved at its first evaluation from there on (train.stop_at), and continues exactly
there. The losses are read from the records of the jobs, so a search that was killed decides as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import Outcome, UserError, print_note
from common.guarded_files import read_from
from common.limits import parse_record
from common.settings import check_at_least, within
from runner.checkpoint.atomic_dir import STEP_NAME
from runner.checkpoint.format import step_of
from runner.engine.config import STOP_KEY, Config, first_step_of
from runner.reporting.runs import saved_settings
from runner.run_dir.best_job import comparison_problem, parse_number
from runner.run_dir.metadata import RunMetadata
from runner.sweep.budget import TOLERANCE, step_size
from runner.sweep.grid import Search, SweeperOptions
from runner.sweep.state import SweepJob, SweepState

RUNG_LIMIT = within("(0, 1)", 0.125).metadata["limit"]


@dataclass
class RungOptions(SweeperOptions):
    """Options of a search that stops jobs at rungs."""

    eta: int = 2  # the best 1/eta of a rung go on, to eta times the steps; of the last rung one more
    first_rung: float = 0.125  # share of the steps

    def __post_init__(self) -> None:
        check_at_least("hydra.sweeper.eta", self.eta, 2, example=2)
        RUNG_LIMIT.check("hydra.sweeper.first_rung", self.first_rung)

    @property
    def shares(self) -> list[float]:
        return rung_shares(self.first_rung, self.eta)

    def check_rungs(self, configs: Sequence[Config], derived: Sequence[Mapping[str, str]]) -> None:
        """Raise UserError for a job that has no evaluation at its rungs, or that something else ends early."""
        name = "hydra/sweeper=halving" if self.is_grid else "hydra.sweeper.pruner"
        begins = {*map(branch_step, configs)}
        if len(begins) > 1:
            problem = f"branches begin at {' and '.join(map(str, sorted(begins)))}"
            fix = "a sweep for each of them, or hydra/sweeper=grid"
            raise UserError(f"{name} compares jobs at equal steps, and {problem}", "init_from", fix)
        begun = min(begins)
        lengths = [self._checked_length(*job, name, begun) for job in zip(configs, derived, strict=True)]
        for steps, _, warmup in lengths:
            if steps and warmup > (first := first_step_of(self.first_rung, steps, begun)):
                share = min(0.5, (warmup - begun) / (steps - begun))
                print_note(
                    f"warning: schedule.warmup_steps={warmup} is longer than the first rung ({first} steps): losses there rank such jobs too low; hydra.sweeper.first_rung={share:.2g}"
                )
                break
        if any("train.max_steps" in each for each in derived):  # jobs that see the same number of tokens in all
            sizes = [step_size(config) for config in configs]
            unit = "tokens" if all(size.tokens for size in sizes) else "rows"
            for number, share in enumerate(self.shares):
                trained = [
                    rung_steps(self.shares, every, steps, begun)[number] * getattr(size, unit)
                    for (steps, every, _), size in zip(lengths, sizes, strict=True)
                ]
                if max(trained) > min(trained) * (1 + TOLERANCE):
                    return print_note(
                        f"warning: at {share_text(share)} of their steps the jobs have trained on {min(trained)} to {max(trained)} {unit}, and losses there favour more: steps are whole, a larger train.max_steps brings them together"
                    )

    def _checked_length(
        self, config: Config, overrides: Mapping[str, str], name: str, begun: int
    ) -> tuple[int, int, int]:
        """Return train.max_steps, train.eval_every and schedule.warmup_steps of a job."""
        train = config.train
        for key, value in ((STOP_KEY, train.stop_at), ("train.patience", train.patience)):
            if value:
                raise UserError(f"{name} ends jobs early itself", f"{key}={value} {name}", f"{key}=0")
        if not config.evaluates:
            raise UserError(
                f"{name} compares jobs by their evaluations, and they have none before their end",
                f"train.eval_every={train.eval_every}",
                "set train.eval_every, and data.val_path or data.val_fraction",
            )
        steps, every = (int(overrides.get(f"train.{key}", vars(train)[key])) for key in ("max_steps", "eval_every"))
        if 0 < steps <= begun:
            fix = f"train.max_steps=N with N > {begun}"
            raise UserError(f"branches of step {begun} have no step left", f"train.max_steps={steps}", fix)
        if steps and not self._evaluates_at_rungs(every, steps, begun):  # the steps of epochs are not known yet
            first = first_step_of(self.first_rung, steps, begun)
            fitting = (each for each in range(first - begun, 0, -1) if self._evaluates_at_rungs(each, steps, begun))
            raise UserError(
                f"{name} needs an evaluation at each rung, the first one after {first} of {steps} steps",
                f"train.eval_every={every} train.max_steps={steps}",
                f"train.eval_every={next(fitting)}, or a larger hydra.sweeper.first_rung",
            )
        return steps, every, int(overrides.get("schedule.warmup_steps", config.schedule.warmup_steps))

    def _evaluates_at_rungs(self, every: int, steps: int, begun: int) -> bool:
        """Whether a job has an evaluation of its own at each rung, and the first one in time."""
        found = [*rung_steps(self.shares, every, steps, begun), steps]
        is_early = every <= first_step_of(self.first_rung, steps, begun) - begun
        return every == 1 or (is_early and all(before < after for before, after in pairwise(found)))


def branch_step(config: Config) -> int:
    """Return the step of the checkpoint that a job continues; 0: it is no branch."""
    checkpoint = Path(config.init_from).name
    return step_of(checkpoint) if config.keep == "optimizer" and STEP_NAME.fullmatch(checkpoint) else 0


def rung_shares(first_rung: float, eta: int) -> list[float]:
    """Return the shares of the steps at which jobs are compared, e.g. [0.125, 0.25, 0.5]."""
    shares = [first_rung]
    while (share := round(shares[-1] * eta, 12)) < 1:
        shares.append(share)
    return shares


def rung_steps(shares: Sequence[float], every: int, steps: int, begun: int) -> list[int]:
    """Return the step of the evaluation, one each `every` steps, at which a job of `steps` stops at each rung."""
    return [-(-first_step_of(share, steps, begun) // every) * every for share in shares]


def share_text(share: float) -> str:
    return str(Fraction(share).limit_denominator(1000))


@dataclass
class Reached:
    """What the records of a job say: its evaluation losses at the rungs it has reached, the full run included."""

    losses: list[float] = field(default_factory=list)
    is_between: bool = False  # it has trained beyond its last rung, or towards its first one
    evaluation: Any = None  # what identifies its evaluation rows
    total_steps: int = 0  # its own: of a branch, those after its start
    gap: float = math.inf  # number of the first rung without an evaluation before the next one
    attempt: int = 0  # processes that have trained it


def read_reached(run_dir: Path, shares: Sequence[float]) -> Reached:
    """Return how far the job in `run_dir` has come."""
    if not shares:
        return Reached()
    run, metrics = RunMetadata.read(run_dir), run_dir / "metrics.jsonl"
    begun = branched if isinstance(branched := (run.get("branched_from") or {}).get("step"), int) else 0
    total, position, evaluations = total_steps(run), run.get("step", 0), dict[int, float]()
    lines = read_from(metrics, 0).splitlines() if metrics.exists() else []
    newest = lines[-2:]  # the last one may be incomplete
    for record in map(parse_record, [line for line in lines[:-2] if b'"eval"' in line] + newest):
        if isinstance(step := record.get("step"), int):
            position = max(position, step)
            if record.get("kind") == "eval":
                loss = record.get("loss")
                evaluations[step] = float(loss) if isinstance(loss, int | float) else math.inf
    is_completed = run.get("status") == "completed"
    reached = Reached(evaluation=run.get("evaluation"), total_steps=total - begun, attempt=run.get("attempt", 0))
    last = begun  # step of the evaluation at the last rung
    rungs = [first_step_of(share, total, begun) for share in shares] if total else []
    for number, (rung, following) in enumerate(pairwise([*rungs, total])):
        step = next((step for step in sorted(evaluations) if rung <= step < total), None)
        if step is None and not is_completed:
            break
        if step is None or rung < step >= following:
            reached.gap = min(reached.gap, number)
        last = step or last
        loss = math.inf if step is None else evaluations[step]
        lowest = min((each for at, each in evaluations.items() if begun < at <= last), default=loss)
        reached.losses.append(lowest if lowest < loss < math.inf and _exports_best(run_dir) else loss)
    if is_completed:
        reached.losses += [math.inf] * (len(shares) - len(reached.losses)) + [0.0]  # nothing is compared at the end
    else:
        reached.is_between = position > last
    return reached


def _exports_best(run_dir: Path) -> bool:
    """Whether the job is ranked by its lowest loss: that of the weights which its model/ gets in the end."""
    settings = saved_settings(run_dir)
    weights = settings.get("export.weights", "best")  # none in a damaged file: restored when the job is resumed
    return weights == "best" or (weights == "auto" and not parse_number(settings.get("train.ema_decay", "0")))


def total_steps(run: Mapping[str, Any]) -> int:
    """Return the steps of the run, as it was first started; 0 where run.json does not say."""
    totals = (each.get("total_steps") for each in run.get("attempts", ()))
    return next((total for total in totals if isinstance(total, int)), 0)


class RungSearch(Search):
    """What searches with rungs share: each start of a job has a rung as its target."""

    def __init__(self, state: SweepState, shares: Sequence[float]) -> None:
        super().__init__(state)
        self.shares = shares
        self.targets: dict[str, int] = {}  # job name -> number of rungs that its running process trains to
        self.reached: dict[str, Reached] = {}
        for job in state.jobs:
            self.reread(job)
            self.record_pause(job)

    def reread(self, job: SweepJob) -> Reached:
        self.reached[job.name] = read_reached(self.state.folder / job.name, self.shares)
        return self.reached[job.name]

    def hand_out(self, job: SweepJob, target: int) -> SweepJob:
        self.targets[job.name] = target
        return job

    def arguments(self, job: SweepJob) -> list[str]:
        if not self.shares:
            return []
        target = self.targets[job.name]
        return [f"{STOP_KEY}={self.shares[target - 1] if target <= len(self.shares) else 0}"]

    def is_due(self, job: SweepJob) -> bool:
        """Whether the job is still below the target that it was handed out for."""
        return len(self.reread(job).losses) < self.targets.get(job.name, 0)

    def record_pause(self, job: SweepJob) -> None:
        """Record that a job is paused that was killed between its evaluation at a rung and its own record of it."""
        reached = self.reached[job.name]
        if not reached.losses or reached.is_between or job.is_diverged or job.status not in ("interrupted", "failed"):
            return
        self.pause(job)

    def pause(self, job: SweepJob) -> None:
        """Record that the job is paused: no launch continues it unless the search does."""
        with suppress(UserError), RunMetadata.open(self.state.folder / job.name, resume=True) as metadata:
            metadata.finish(Outcome.PAUSED)
            job.status = "interrupted"
            self.state.refresh_job(job)
            self.state.update_job(job, error=None, last_lines=[])

    def finish_rung(self, job: SweepJob) -> bool:
        """Record that a job which has ended is paused at its rung; return whether it has reached it.

        Raises UserError if the evaluations at the rungs do not tell jobs apart.
        """
        if self.is_due(job):
            return False
        self.record_pause(job)
        target, reached = self.targets.get(job.name, 0), self.reached[job.name]
        if reached.gap < target <= len(self.shares):
            rung, following = ([*self.shares, 1.0][int(reached.gap) + more] for more in (0, 1))
            raise UserError(
                f"{job.name} has no evaluation between {share_text(rung)} and {share_text(following)} of its steps",
                "train.eval_every",
                f"start another sweep with train.eval_every={max(1, int(self.shares[0] * reached.total_steps))}",
            )
        if problem := comparison_problem(each.evaluation for each in self.reached.values() if each.losses):
            raise UserError(
                f"jobs cannot be stopped early by these losses: they were judged {problem}",
                str(self.state.folder),
                "correct it and start another sweep; one with hydra/sweeper=grid trains all jobs to their end",
            )
        return True
