"""`resume=SWEEP key=value ...`: new points of the sweep, and new overrides for jobs that have begun."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError, print_note
from common.registry import check_imported
from common.settings import setting_values
from runner.checkpoint.compatibility import ROWS_PER_STEP, diff_facts, run_rules
from runner.checkpoint.format import read_newest_state
from runner.config.compose import compose_tree
from runner.config.overrides import check_overrides, is_hydra_override, key_of, plugins_of, to_overrides
from runner.engine.config import STOP_KEY, Config, TrainConfig, rows_per_step
from runner.launch import resume
from runner.run_dir.contents import has_started
from runner.run_dir.metadata import RunMetadata
from runner.sweep import budget, grid, validation
from runner.sweep.grid import PointComposer
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepJob, SweepState, storable_overrides

STEPS_KEY = "train.max_steps"
# a change of these alone is no difference between jobs that train no further
LENGTH_KEYS = (f"{STEPS_KEY}:", "train.epochs:")
# where jobs are compared
RUNG_KEYS = {STEPS_KEY, STOP_KEY, "train.epochs", "train.eval_every", "train.patience"}
RUNG_KEYS |= {"hydra.sweeper.eta", "hydra.sweeper.first_rung"}
SEARCH_KEYS = ("hydra.sweeper.objectives", "hydra.sweeper.direction")  # what a study compares
SEED_RULES = (
    "sweep.seeds=",
    "sweep.top=",
    "sweep.budget=",
)  # rules of a sweep that may change: they say what is run after its grid


@dataclass
class Additions:
    """What is typed with `resume=SWEEP`."""

    shared: list[str] = field(default_factory=list)  # overrides of all jobs
    swept: dict[str, list[str]] = field(default_factory=dict)  # new values of swept keys

    def __bool__(self) -> bool:
        return bool(self.shared or self.swept)

    @property
    def training(self) -> list[str]:
        """The overrides of all jobs without those of Hydra and of the sweep itself."""
        return [
            override for override in self.shared if not (is_hydra_override(override) or override.startswith(SEED_RULES))
        ]


def parse_additions(state: SweepState, typed: list[str], conf: Path) -> Additions:
    """Split the typed overrides. Raises UserError for those that this sweep cannot take."""
    check_imported(plugins_of(typed))
    for override in typed:
        is_other = override.startswith("hydra/sweeper=") and override != f"hydra/sweeper={state.sweeper}"
        if is_other or (key_of(override) in SEARCH_KEYS and override not in state.overrides):
            raise UserError("the search of a sweep cannot change", override, "leave it out, or start another sweep")
    validation.check_hydra_overrides(grid.merge_overrides(state.overrides, typed))
    shared, swept = grid.split_swept(typed, conf, is_grid=state.sweeper != "optuna", known=state.swept)
    check_overrides([*shared, *(f"{key}={value}" for key, values in swept.items() for value in values)], conf)
    if unknown := next((key for key in swept if key not in state.swept), None):
        fix = f"give {unknown} one value, or start a sweep over it"
        raise UserError(f"{unknown} is not swept here: the jobs that exist have no value of it", unknown, fix)
    if swept and state.sweeper == "optuna":
        raise UserError(
            "the search space of a study cannot change", next(iter(swept)), "leave it out, or start another sweep"
        )
    for override in shared:
        key = key_of(override)
        if key in resume.FIXED_KEYS and any(
            RunMetadata.read(state.folder / job.name).get("attempt") for job in state.jobs
        ):
            raise UserError(
                f"{key} of a sweep that has begun cannot change",
                override,
                f"start another sweep with init_from={state.folder}/<job>",
            )
        if override.startswith(("sweep.", validation.SWEEP_DIR_KEY)) and not override.startswith(SEED_RULES):
            raise UserError(
                "the directory and the rules of a sweep cannot change", override, "leave it out, or start another sweep"
            )
    return Additions(shared, swept)


def apply_additions(state: SweepState, additions: Additions, conf: Path) -> None:
    """Add points and overrides to `state`, which is not written.

    Raises UserError for what the sweep cannot take.
    """
    shared = grid.merge_overrides(state.overrides, additions.shared)
    tree = compose_tree(shared, conf)
    sweeper, _ = validation.hydra_options(tree)
    changed = (each for each in additions.shared if each not in state.overrides)
    if sweeper.stops_jobs and (moved := next((each for each in changed if key_of(each) in RUNG_KEYS), None)):
        raise UserError(
            "length and evaluations of jobs that are compared at shares of their steps cannot change",
            moved,
            f"resume={state.folder}/<job> changes a setting of one job; or start another sweep",
        )
    swept = {key: [*dict.fromkeys([*values, *additions.swept.get(key, [])])] for key, values in state.swept.items()}
    composer = PointComposer(shared, conf, tree)
    new_values = {key: additions.swept.get(key, values) for key, values in state.swept.items()}
    points = grid.cartesian_points(new_values, tree.sweep.zip) if additions.swept else []
    open_jobs = [job for job in state.jobs if not job.is_diverged]
    configs = composer.checked_configs(points)
    budget.warn_if_unequal([*(composer.config(job.overrides) for job in open_jobs), *configs], state.base_step, swept)
    training = additions.training
    begun = [job for job in open_jobs if training and has_started(RunMetadata.read(state.folder / job.name))]
    composer.checked_configs([job.overrides for job in begun])
    before = SweepSession(state, conf)
    lengths = {  # train.max_steps that the sweep has given to a job so far
        job.name: int(
            before.derived_overrides(job).get(STEPS_KEY, before.composer.config(job.overrides).train.max_steps)
        )
        for job in begun
    }
    state.overrides, state.swept = storable_overrides(shared), swept
    session = SweepSession(state, conf, composer)
    for point in points:
        session.derived_overrides(state.add_job(point))  # refuses a point whose budget cannot match
    for job in begun:
        job.pending_overrides = overrides_for_job(
            session.run_dir(job), job, pending_overrides(session, job, training), lengths[job.name]
        )
        job.applied_overrides = [*dict.fromkeys([*job.applied_overrides, *job.pending_overrides])]
    kept = [job for job in begun if not job.pending_overrides]
    if kept and (labels := [override for override in training if override.startswith("run.")]):
        print_note(
            f"resume: {len(kept)} completed jobs keep their labels; {shlex.join([f'resume={state.folder / kept[0].name}', *labels])} changes those of a job"
        )


def pending_overrides(session: SweepSession, job: SweepJob, training: list[str]) -> list[str]:
    """Return the overrides that a job which has begun is continued with: those that wait already, and `training`,
    scaled to the job's step.
    """
    keys = set(map(key_of, training))
    derived = [override for override in to_overrides(session.derived_overrides(job)) if key_of(override) in keys]
    return grid.merge_overrides(job.pending_overrides, grid.merge_overrides(training, derived))


def overrides_for_job(run_dir: Path, job: SweepJob, overrides: list[str], length: int) -> list[str]:
    """Return those of `overrides` that a job which has begun is continued with; none for a completed one that would
    take no further step.

    `length` is the train.max_steps that the sweep has given the job so far. Raises UserError for an override that the
    job cannot take, or that a completed job would lack beside the jobs that get it.
    """
    before, progress = resume.plan_resume(run_dir, []).config, _saved_progress(run_dir)
    after, step = resume.plan_resume(run_dir, overrides).config, progress["step"]
    if step > (after.train.max_steps or step):
        if before.train.max_steps <= length:
            setting = f"{run_dir.name}: {STEPS_KEY}={after.train.max_steps}"
            raise UserError(
                f"a job of this sweep has already taken {step} steps", setting, f"give {STEPS_KEY} a larger number"
            )
        print_note(
            f"resume: {run_dir.name} was resumed by itself up to step {step}: {STEPS_KEY} is left as it is there"
        )
        overrides = [override for override in overrides if not override.startswith(f"{STEPS_KEY}=")]
        after = resume.plan_resume(run_dir, overrides).config
    changes = diff_facts(_compatibility_facts(before), _compatibility_facts(after), run_rules(after))
    if incompatible := changes["incompatible"]:
        raise UserError(
            "a job that has begun cannot take this setting",
            f"{run_dir.name}: {incompatible[0]}",
            "leave it out, or start another sweep with it",
        )
    if job.status != "completed" or _would_train_further(run_dir, before.train, after.train, progress):
        return overrides
    ends = [  # that may be earlier; with a later one, a job that was not stopped would have the same steps
        f"train.{key}={new}"
        for key in ("patience", "stop_at")
        if 0 < (new := getattr(after.train, key)) < (getattr(before.train, key) or new + 1)
    ]
    if missing := [change for change in changes["changes_training"] if not change.startswith(LENGTH_KEYS)] + ends:
        fix = f"start another sweep with it, or add {STEPS_KEY}=N with N > {step} to train further"
        raise UserError("jobs of this sweep are completed without this setting", f"{run_dir.name}: {missing[0]}", fix)
    return []


def _would_train_further(run_dir: Path, before: TrainConfig, after: TrainConfig, progress: dict[str, int]) -> bool:
    """Whether a completed run would take another step."""
    if 0 < after.patience <= progress["evals_since_best"]:
        if (before.max_steps, before.epochs) != (after.max_steps, after.epochs):
            print_note(
                f"resume: {run_dir.name} was stopped by train.patience at step {progress['step']}: it is left as it is"
            )
        return False
    if after.max_steps:
        return progress["step"] < after.max_steps
    if before.max_steps or after.epochs < before.epochs:
        setting = f"{run_dir.name}: train.epochs={after.epochs}"
        raise UserError(
            "it is not known whether this trains completed jobs further", setting, f"give {STEPS_KEY}=N instead"
        )
    return after.epochs > before.epochs or 0 < before.patience <= progress["evals_since_best"]


def _saved_progress(run_dir: Path) -> dict[str, int]:
    """Return the step that a run has reached, and its evaluations since the best one."""
    progress = (read_newest_state(run_dir) or {}).get("progress", {"step": 0, "evals_since_best": 0})
    recorded = RunMetadata.read(run_dir).get("step", 0)
    return {"step": max(recorded, progress["step"]), "evals_since_best": progress["evals_since_best"]}


def _compatibility_facts(config: Config) -> dict[str, Any]:
    return setting_values(config) | {ROWS_PER_STEP: rows_per_step(config)}
