"""`hydra/sweeper=optuna`: Optuna draws the points, one whenever a worker is free.

The study is a file of the sweep directory.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from common.errors import UserError
from common.filesystem import read_bounded, write_atomic_file
from common.guarded_files import check_own_files, last_records
from common.limits import check_json_size, check_nesting
from common.settings import check_at_least, check_choice, check_installed
from runner.config import schema
from runner.config.hydra_errors import translating_hydra_errors
from runner.engine.config import Config
from runner.run_dir.best_job import SEED_KEY, comparison_problem, fewest_rows, point_of
from runner.run_dir.metadata import RunMetadata
from runner.sweep.grid import GridPoint, SweeperOptions, listed_values
from runner.sweep.halving import HalvingOptions
from runner.sweep.rungs import RungOptions, RungSearch
from runner.sweep.state import SweepJob, SweepState

STUDY_NAME, JOURNAL_FILE, RESULTS_FILE = "sweep", "optuna.jsonl", "optimization_results.yaml"
MAX_JOURNAL_BYTES = 64 << 20  # of the journal of a study; a trial has 1 KB
SAMPLERS = ("tpe", "random", "nsgaii", "grid", "qmc")  # not cmaes: it stores pickles in the study
DIRECTIONS = ("minimize", "maximize")
PRUNERS = ("none", "halving", "median")


@dataclass
class OptunaOptions(RungOptions):
    """Options of `hydra/sweeper=optuna`. As many jobs run at the same time as the launcher has workers."""

    _target_: str = "hydra_plugins.lm_runner.OptunaSweeper"
    n_trials: int = 20  # points that get a loss, over all launches of the sweep
    # loss, or keys of the last train record of metrics.jsonl
    objectives: list[str] = field(default_factory=lambda: ["loss"])
    direction: Any = "minimize"  # minimize or maximize; a list with one for each objective
    sampler: str = "tpe"  # tpe, random, nsgaii, grid (lists and ranges only), qmc
    seed: Optional[int] = None  # of the sampler; null: another one each time
    pruner: str = "none"  # none, halving or median: stops jobs at the rungs
    is_grid = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("hydra.sweeper.pruner", self.pruner, PRUNERS)
        self.stops_jobs = self.pruner != "none"
        check_at_least("hydra.sweeper.n_trials", self.n_trials, 1, example=20)
        check_choice("hydra.sweeper.sampler", self.sampler, SAMPLERS)
        for direction in self.directions:
            check_choice("hydra.sweeper.direction", direction, DIRECTIONS)
        if len(self.directions) != len(self.objectives) or not self.objectives:
            setting = f"hydra.sweeper.objectives=[{','.join(self.objectives)}] hydra.sweeper.direction=[{','.join(self.directions)}]"
            example = (
                "'hydra.sweeper.objectives=[loss,tokens_per_second]' 'hydra.sweeper.direction=[minimize,maximize]'"
            )
            raise UserError(
                "hydra.sweeper.direction must have one entry for each objective", setting, f"e.g. {example}"
            )

        if self.stops_jobs and (self.objectives != ["loss"] or self.directions != ["minimize"]):
            raise UserError(
                "a pruner compares losses, and this study has another objective",
                f"hydra.sweeper.pruner={self.pruner} hydra.sweeper.objectives=[{','.join(self.objectives)}]",
                "hydra.sweeper.pruner=none, or hydra.sweeper.objectives=[loss]",
            )

    @property
    def directions(self) -> list[Any]:
        return [self.direction] if isinstance(self.direction, str) else [str(direction) for direction in self.direction]

    def check_available(self) -> None:
        check_installed("optuna", "hydra/sweeper=optuna")
        if self.sampler == "qmc":
            check_installed("scipy", "hydra.sweeper.sampler=qmc")

    def points(self, swept: Mapping[str, list[str]], zipped: Iterable[str]) -> list[GridPoint]:
        """Return points with every choice and both ends of every interval: their configs are checked before the first
        job.
        """
        if SEED_KEY in swept:
            raise UserError(
                "a sampler would search for the best seed",
                f"{SEED_KEY}={','.join(swept[SEED_KEY])} hydra/sweeper=optuna",
                "leave it out; sweep.seeds=5 adds seeds to the best points",
            )
        if zipped:
            raise UserError(
                "sweep.zip needs hydra/sweeper=grid, got optuna",
                "sweep.zip hydra/sweeper=optuna",
                "leave out one of them",
            )
        space = {key: ends(parse_distribution(key, values)) for key, values in swept.items()}
        interval = next((f"{key}={values[0]}" for key, values in swept.items() if "interval(" in values[0]), None)
        if self.sampler == "grid" and interval:
            raise UserError(
                "hydra.sweeper.sampler=grid needs lists or ranges of values",
                interval,
                "choose hydra.sweeper.sampler=qmc or list values",
            )
        first = {key: values[0] for key, values in space.items()}
        return [first, *({**first, key: value} for key, values in space.items() for value in values[1:])]

    def check_plan(
        self, points: Sequence[GridPoint], configs: Sequence[Config], derived: Sequence[Mapping[str, str]]
    ) -> None:
        if self.stops_jobs:
            self.check_rungs(configs, derived)

    def search(self, state: SweepState) -> OptunaSearch:
        return OptunaSearch(state, self)


def parse_distribution(key: str, values: Sequence[str]) -> Any:
    """Return Optuna's distribution of an override: `a,b`, `range(1,9,2)`, `interval(0.0,0.2)`,
    `tag(log,interval(1e-5,1e-2))`.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    text = f"{key}={','.join(values)}"
    with translating_hydra_errors([text]):
        sweep = OverridesParser.create().parse_override(text).value()
    low: Any
    high: Any
    if isinstance(sweep, RangeSweep) and len(values) == 1:
        numbers = listed_values(sweep.range(), text)
        low, high, step = min(numbers), max(numbers), abs(sweep.step)
        is_int = all(isinstance(number, int) for number in numbers)
    elif isinstance(sweep, IntervalSweep):
        low, high, step = sweep.start, sweep.end, None
        is_int = schema.config_schema().get(key) is int or (isinstance(low, int) and isinstance(high, int))
    else:
        return CategoricalDistribution(values)
    log = "log" in sweep.tags
    if is_int:
        low, high = math.ceil(low), math.floor(high)
    if (step is None and low >= high) or (log and (low <= 0 or (step and (step != 1 or not is_int)))):
        rule = "0 < start < end, and a range the step 1" if log else "start < end"
        raise UserError(
            f"the interval of {key} must have {rule}",
            text,
            f"e.g. {key}=tag(log,interval(1e-5,1e-2))" if log else f"{key}=interval({high},{low})",
        )
    if is_int:
        return IntDistribution(low, high, log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


def list_values(distribution: Any) -> list[Any]:
    """Return all values of a list or range."""
    if choices := getattr(distribution, "choices", None):
        return list(choices)
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + index * distribution.step for index in range(count)]


def ends(distribution: Any) -> list[str]:
    """Return all choices, or both ends of an interval or range, as values of an override."""
    return list(getattr(distribution, "choices", ())) or [repr(distribution.low), repr(distribution.high)]


SWEEPERS = {"grid": SweeperOptions, "halving": HalvingOptions, "optuna": OptunaOptions}  # options of hydra/sweeper


class OptunaSearch(RungSearch):
    """Draws the jobs of a sweep from a study and reports their results to it.

    With a pruner a job pauses at each rung: its loss is reported, and it continues at once, or stays as it is.
    """

    def __init__(self, state: SweepState, options: OptunaOptions) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        super().__init__(state, [] if options.pruner == "none" else options.shares)
        self.options = options
        self.space = {key: parse_distribution(key, values) for key, values in state.swept.items()}
        self.study = self._open_study()
        for trial in self._trials_that_are("RUNNING"):
            if trial.params.keys() != self.space.keys():  # killed while the point was drawn
                self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        resumed = self._trials_that_are("RUNNING")  # of a launch that was stopped or killed
        remaining = options.n_trials - len(self._trials_that_are("COMPLETE", "PRUNED")) - len(resumed)
        self._enqueue_failed()
        if options.sampler == "grid":
            remaining = min(remaining, len(self._trials_that_are("WAITING")))
        self.drawn = itertools.chain(resumed, (self.study.ask(self.space) for _ in range(remaining)))
        self.open_trials: dict[str, list[int]] = defaultdict(list)  # job name -> numbers of its trials without a result
        self.continuing: list[SweepJob] = []  # drawn, to be started or continued

    def _trials_that_are(self, *states: str) -> list[Any]:
        return [trial for trial in self.study.get_trials() if trial.state.name in states]

    def _open_study(self) -> Any:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = self.state.folder / JOURNAL_FILE
        _drop_partial_line(path)
        # the sweep directory is locked by this process; Optuna's own lock file would outlive a kill
        lock: Any = SimpleNamespace(acquire=lambda: True, release=lambda: None)
        storage = JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
        study = optuna.create_study(
            study_name=STUDY_NAME, storage=storage, directions=self.options.directions, load_if_exists=True
        )
        if [direction.name.lower() for direction in study.directions] != self.options.directions:
            raise UserError(
                "the directions of a study cannot change",
                "hydra.sweeper.direction",
                "leave it out, or start another sweep",
            )
        study.sampler = self._make_sampler(len(study.trials))
        study.pruner = {
            "none": optuna.pruners.NopPruner(),
            "halving": optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=self.options.eta),
            "median": optuna.pruners.MedianPruner(),
        }[self.options.pruner]
        if self.options.sampler == "grid" and not study.trials:
            for values in itertools.product(*map(list_values, self.space.values())):
                study.enqueue_trial(dict(zip(self.space, values, strict=True)))
        return study

    def _make_sampler(self, drawn: int) -> Any:
        import optuna
        from optuna import samplers

        seed = self.options.seed
        if self.options.sampler == "qmc":
            with warnings.catch_warnings():
                # its interface may change: requirements.lock pins it
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return samplers.QMCSampler(seed=seed)
        later_seed = None if seed is None else seed + drawn  # the same seed again would draw the same points again
        return {"tpe": samplers.TPESampler, "nsgaii": samplers.NSGAIISampler}.get(
            self.options.sampler, samplers.RandomSampler
        )(seed=later_seed)

    def _enqueue_failed(self) -> None:
        """Draw the points of failed jobs again: in their run directories they continue."""
        others = [trial.params for trial in self._trials_that_are("RUNNING", "COMPLETE", "PRUNED")]
        others += [trial.system_attrs.get("fixed_params") for trial in self._trials_that_are("WAITING")]
        for trial in self._trials_that_are("FAIL"):
            job = self.state.find_job(_to_overrides(trial.params))
            if job and (job.needs_run or job.status == "paused") and trial.params not in others:
                self.study.enqueue_trial(trial.params)
                others.append(trial.params)

    def next_job(self) -> SweepJob | None:
        while not self.continuing:
            if (trial := next(self.drawn, None)) is None:
                return None
            job = self.state.add_job(_to_overrides(trial.params))
            self.open_trials[job.name].append(trial.number)
            if len(self.open_trials[job.name]) > 1:  # the same point was drawn again while its job runs
                continue
            if job.needs_run:
                self.continuing.append(job)
            else:
                self.job_ended(job)
        job = self.continuing.pop(0)
        return self.hand_out(job, len(self.reread(job).losses) + 1)

    def job_ended(self, job: SweepJob) -> None:
        """Report the result of a job.

        The trial of an interrupted job stays open: the next launch continues it.
        """
        from optuna.trial import TrialState

        if self.shares:
            self.finish_rung(job)
        if job.status in ("interrupted", "new"):
            return
        if job.status == "paused" and not self._is_pruned(job):
            return self.continuing.append(job)
        values = self._objective_values(job)
        is_final = job.status == "paused" or job.is_diverged  # not drawn again
        failed = TrialState.PRUNED if is_final else TrialState.FAIL
        for number in self.open_trials.pop(job.name, []):
            self.study.tell(number, values, state=None if values else failed)

    def _is_pruned(self, job: SweepJob) -> bool:
        """Report the losses at the rungs that the job has reached, each once; return whether the pruner stops it there."""
        from optuna.trial import Trial

        decisions = []
        for number in self.open_trials[job.name] if self.shares else ():
            frozen = self.study.trials[number]
            trial = Trial(self.study, frozen._trial_id)
            for rung, loss in enumerate(self.reached[job.name].losses):
                # the steps of SuccessiveHalvingPruner: 1, eta, eta ** 2, ...
                if (step := self.options.eta**rung) not in frozen.intermediate_values:
                    trial.report(loss, step)
            decisions.append(trial.should_prune())
        return any(decisions)

    def _objective_values(self, job: SweepJob) -> list[float] | None:
        """Return a value per objective, None where one is missing.

        The loss of a diverged job is infinite, from which the sampler learns; as a failed job, it has no other value.
        """
        if job.loss is None or (job.is_diverged and self.options.objectives != ["loss"]):
            return None
        records = reversed(last_records(self.state.folder / job.name / "metrics.jsonl"))
        logged: dict[str, Any] = next((each for each in records if each.get("kind") == "train"), {})
        record = {"skipped_steps": 0, **logged, "loss": float(job.loss)}
        names = self.options.objectives
        if job.status == "completed" and logged and (unknown := [name for name in names if name not in record]):
            known = [key for key, value in record.items() if isinstance(value, int | float)]
            fix = f"start another sweep with objectives of {', '.join(known)}"
            raise UserError(f"the records of {job.name} lack an objective", f"hydra.sweeper.objectives={unknown}", fix)
        values = [float(value) for name in names if isinstance(value := record.get(name), int | float)]
        return values if len(values) == len(names) else None

    def close(self) -> None:
        """Write the best point, or with several objectives the Pareto front, to optimization_results.yaml; with the
        reason, where losses do not rank them.
        """
        if not self._trials_that_are("COMPLETE"):
            return
        if len(self.options.objectives) == 1:
            best = self.study.best_trial
            results = {"name": "optuna", "best_evaluated_params": best.params, "best_evaluated_value": best.value}
        else:
            results = {
                "name": "optuna",
                "solutions": [
                    {"params": trial.params, "values": list(trial.values)} for trial in self.study.best_trials
                ],
            }
        completed = [job for job in self.state.jobs if job.status == "completed" and not self.state.is_added_seed(job)]
        evaluations = [RunMetadata.read(self.state.folder / job.name).get("evaluation") for job in completed]
        seeds = Counter(point_of(job.overrides) for job in completed).values()
        results |= {"evaluation_rows": fewest_rows(evaluations), "seeds_per_point": min(seeds, default=0)}
        if "loss" in self.options.objectives and (problem := comparison_problem(evaluations)):
            results["problem"] = f"the jobs were judged {problem}"
        write_atomic_file(self.state.folder / RESULTS_FILE, yaml.safe_dump(results, sort_keys=False).encode())


def _to_overrides(params: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in params.items()}


def _drop_partial_line(path: Path) -> None:
    """Cut the journal back to its last complete line: a killed process may have written half of one."""
    check_own_files(path.parent, (), shallow=(path.name,))
    if path.exists():
        content = read_bounded(path, MAX_JOURNAL_BYTES)
        end = content.rfind(b"\n") + 1
        _check_journal(content[:end], path)
        os.truncate(path, end)


def _check_journal(content: bytes, path: Path) -> None:
    """Raise UserError unless every line is a record that Optuna can read.

    It writes NaN and infinities as Python does.
    """
    for number, line in enumerate(content.splitlines(), 1):
        try:
            check_json_size(line)
            record = json.loads(line)
            check_nesting(record)
            if not isinstance(record, dict) or type(record.get("op_code")) is not int:
                raise ValueError("no record of a study")
        except (ValueError, RecursionError) as error:
            fix = "restore the file; without it the sweep starts another study"
            raise UserError(f"the study is damaged: {error}", f"{path}:{number}", fix) from error
