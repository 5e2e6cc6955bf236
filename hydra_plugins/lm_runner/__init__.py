"""Hydra's plugins of this program: `hydra/launcher=local|submitit|ray` and `hydra/sweeper=grid|optuna`.

Hydra executes every module of the namespace package `hydra_plugins` (hence no __init__.py there) when it starts, and
registers the plugin classes it finds. Nothing else may import this module: it would be executed twice. What the plugins
do is in runner/sweep.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from common.errors import UserError
from runner.sweep.backends import LAUNCHERS
from runner.sweep.optuna_search import SWEEPERS

for group, nodes in (("launcher", LAUNCHERS), ("sweeper", SWEEPERS)):
    for name, node in nodes.items():
        ConfigStore.instance().store(group=f"hydra/{group}", name=name, node=node, provider="lm_runner")


class JobLauncher(Launcher):
    """Runs jobs on the backend that the options choose.

    Each is a process `train.py resume=JOB_DIR`, whose run directory is written first.
    """

    def __init__(self, **options: Any) -> None:
        self.session: Any = None  # set by the sweeper

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from runner.sweep.validation import hydra_options

        self.options = hydra_options(config)[1]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs of these overrides that need it. Raises SweepStopped."""
        if self.session is None:
            raise UserError(
                "hydra/launcher needs a sweeper of this program",
                "hydra/sweeper",
                "hydra/sweeper=grid or hydra/sweeper=optuna",
            )
        jobs = [self.session.job_of(overrides) for overrides in job_overrides]
        if due := [job for job in jobs if job.needs_run]:
            remaining = iter(due)
            self.run(lambda: next(remaining, None))
        return [_job_return(job, overrides) for job, overrides in zip(jobs, job_overrides, strict=True)]

    def run(self, next_job: Callable[[], Any], on_end: Callable[[Any], None] = lambda job: None) -> None:
        """Run jobs as `next_job` returns them whenever a worker is free, until it returns None.

        Raises SweepStopped.
        """
        from runner.sweep.scheduler import run_jobs

        run_jobs(self.session, self.options, next_job, on_end)


class GridSweeper(Sweeper):
    """Trains every combination of the swept values."""

    def __init__(self, **options: Any) -> None: ...

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config: Any = config
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from runner.sweep.session import open_session

        with open_session(self.config, arguments) as session:
            self.launcher.session = session
            jobs = [
                [f"{key}={value}" for key, value in job.overrides.items()]
                for job in session.state.jobs
                if job.needs_run
            ]
            return self.launcher.launch(jobs, initial_job_idx=0)


class OptunaSweeper(GridSweeper):
    """Trains the points that Optuna draws, each as soon as a worker is free."""

    def sweep(self, arguments: list[str]) -> Any:
        from runner.sweep.optuna_search import OptunaSearch
        from runner.sweep.session import open_session

        with open_session(self.config, arguments) as session:
            self.launcher.session = session
            options: Any = OmegaConf.to_object(self.config.hydra.sweeper)
            search = OptunaSearch(session.state, options)
            try:
                self.launcher.run(search.next_job, search.job_ended)
            finally:
                search.write_results()


def _job_return(job: Any, overrides: Sequence[str]) -> JobReturn:
    has_loss = job.status == "completed" or job.is_diverged
    value = float(job.loss or 0.0) if has_loss else RuntimeError(f"{job.name}: {job.error or job.status}")
    return JobReturn(
        overrides=list(overrides), status=JobStatus.COMPLETED if has_loss else JobStatus.FAILED, _return_value=value
    )
