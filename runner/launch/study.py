"""Sweeps whose points Optuna chooses, through Hydra's plugin: the study stands in the folder of the sweep and continues with it."""

from __future__ import annotations

import warnings
from typing import Any

from hydra.plugins.sweeper import Sweeper


class StudySweeper(Sweeper):
    """Optuna's sweeper, which by itself would forget what was under way when it was killed, and begin to count anew."""

    def __init__(self, **fields: Any) -> None:
        from hydra_plugins.hydra_optuna_sweeper.optuna_sweeper import OptunaSweeper

        self.fields = fields
        with _quiet():
            self.theirs = OptunaSweeper(**fields)

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from runner.launch.foreign import started_by

        self.theirs.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.theirs.sweeper.launcher = started_by(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Any:
        import optuna

        sweeper = self.theirs.sweeper
        with _quiet():
            study = optuna.create_study(study_name=sweeper.study_name, storage=sweeper.storage, directions=sweeper._get_directions(), load_if_exists=True)
            if study.trials:
                _take_up(study)
                if hasattr(sweeper.sampler, "reseed_rng"):
                    sweeper.sampler.reseed_rng()  # from the same seed it would draw the points again that it has drawn
            completed = optuna.trial.TrialState.COMPLETE
            sweeper.n_trials = max(0, sweeper.n_trials - len(study.get_trials(states=(completed,))))
            try:
                return self.theirs.sweep(arguments)
            except ValueError:
                if study.get_trials(states=(completed,)):
                    raise
                return None  # no trial has a value, so none is the best: each job's failure has been said


def _take_up(study: Any) -> None:
    """Ask again for the points whose jobs are not finished: stopped, killed or failed. In their folders they continue."""
    from optuna.trial import TrialState

    from runner.launch.underway import current, is_due

    sweep = current[-1]
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    asked: list[dict[str, Any]] = [trial.system_attrs.get("fixed_params", {}) for trial in study.get_trials(states=(TrialState.WAITING,))]
    for trial in study.get_trials(states=(TrialState.FAIL,)):
        words = [f"{key}={value}" for key, value in trial.params.items()]
        if trial.params and trial.params not in asked and is_due(sweep.job_of(words)):
            study.enqueue_trial(trial.params)
            asked.append(trial.params)


class _quiet(warnings.catch_warnings):
    """The plugin calls Optuna as one did in 2022, and Optuna says so at every call."""

    def __enter__(self) -> Any:
        found = super().__enter__()
        warnings.simplefilter("ignore", FutureWarning)
        return found
