"""Sweeps whose points Optuna chooses, through Hydra's plugin: the study stands in the folder of the sweep and continues with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from common.errors import UserError

PAIRED_OPTIONS, DIRECTIONS = ("objectives", "direction"), ("minimize", "maximize")


class OptunaSweeper(Sweeper):
    """Optuna's sweeper, which by itself would forget what was under way when it was killed, and begin to count anew."""

    def __init__(self, objectives: Sequence[str], **fields: Any) -> None:
        from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper

        self.objectives = list(objectives)
        if OmegaConf.is_config(fields["sampler"]):  # Hydra 1.4 makes the sweeper only, 1.3 what it is made of, too
            fields["sampler"] = _make_sampler(OmegaConf.to_container(fields["sampler"], resolve=True))
        self.theirs = OptunaSweeper(**fields)

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from runner.sweep.plugins.external import make_launcher

        self.theirs.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        starter = make_launcher(hydra_context, task_function, config)
        self.theirs.sweeper.launcher = starter if self.objectives == ["loss"] else MetricLauncher(starter, self.objectives)

    def sweep(self, arguments: list[str]) -> Any:
        import optuna

        sweeper = self.theirs.sweeper
        study = optuna.create_study(study_name=sweeper.study_name, storage=sweeper.storage, directions=sweeper._get_directions(), load_if_exists=True)
        if study.trials:
            _requeue_unfinished(study)
            if hasattr(sweeper.sampler, "reseed_rng"):
                sweeper.sampler.reseed_rng()  # from the same seed it would draw again the points that it has drawn
        completed = (optuna.trial.TrialState.COMPLETE,)
        sweeper.n_trials = max(0, sweeper.n_trials - len(study.get_trials(states=completed)))
        try:
            return self.theirs.sweep(arguments)
        except ValueError:
            if study.get_trials(states=completed):
                raise
            return None  # no trial has a value, so none is the best; why, each job has said


def check_optuna_options(options: Mapping[str, Any]) -> None:
    """Refuse what Optuna would stumble over when the sweep stands there already."""
    objectives, directions = (
        list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] for value in map(options.get, PAIRED_OPTIONS)
    )
    where = " ".join(f"hydra.sweeper.{name}=[{','.join(map(str, values))}]" for name, values in zip(PAIRED_OPTIONS, (objectives, directions), strict=True))
    if len(directions) != len(objectives) or not objectives:
        raise UserError(
            "each objective has a direction", where, "e.g. 'hydra.sweeper.objectives=[loss,tokens_per_second]' 'hydra.sweeper.direction=[minimize,maximize]'"
        )
    if strange := next((way for way in directions if way not in DIRECTIONS), None):
        raise UserError(f"there is no direction {strange}", where, f"choose {' or '.join(DIRECTIONS)}")
    for name in ("n_trials", "n_jobs"):
        if type(options[name]) is not int or options[name] < 1:
            raise UserError("this word takes a whole number, 1 or more", f"hydra.sweeper.{name}={options[name]}", f"write e.g. hydra.sweeper.{name}=4")


class MetricLauncher(Launcher):
    """Between the sampler and a launcher, where more than the loss is wanted of a job: what its last line of metrics.jsonl says."""

    def __init__(self, starter: Launcher, objectives: list[str]) -> None:
        self.starter, self.objectives = starter, objectives

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None: ...

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from runner.sweep.session import current_sessions

        sweep, returns = current_sessions[-1], self.starter.launch(job_overrides, initial_job_idx)
        for words, found in zip(job_overrides, returns, strict=True):
            if isinstance(found._return_value, float):
                logged = {**_last_metrics(sweep.state.folder / sweep.job_of(words)["name"]), "loss": found._return_value}
                found._return_value = [logged.get(name) for name in self.objectives]
        return returns


def _make_sampler(words: Any) -> Any:
    """The sampler that a file of the plugin describes. Its class is one of these, whatever stands there."""
    import optuna.samplers as known

    classes = {f"optuna.samplers.{each.__name__}": each for each in (known.TPESampler, known.RandomSampler, known.GridSampler, known.NSGAIISampler)}
    made = partial(classes[words["_target_"]], **{word: value for word, value in words.items() if word not in ("_target_", "_partial_")})
    return made if words.get("_partial_") else made()  # a grid is told later what to go through


def _last_metrics(folder: Path) -> dict[str, Any]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return next((line for line in map(json.loads, reversed(lines)) if line["kind"] == "train"), {})


def _requeue_unfinished(study: Any) -> None:
    """Ask again for the points whose jobs are not finished: stopped, killed or failed. In their folders they continue."""
    from optuna.trial import TrialState

    from runner.sweep.session import current_sessions, needs_run

    sweep = current_sessions[-1]
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    asked: list[dict[str, Any]] = [trial.system_attrs.get("fixed_params", {}) for trial in study.get_trials(states=(TrialState.WAITING,))]
    known = [job["overrides"] for job in sweep.state.jobs if needs_run(job)]
    for trial in study.get_trials(states=(TrialState.FAIL,)):
        if trial.params not in asked and {key: str(value) for key, value in trial.params.items()} in known:
            study.enqueue_trial(trial.params)
            asked.append(trial.params)
