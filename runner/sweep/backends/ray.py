"""`hydra/launcher=ray`: jobs as tasks of a Ray cluster, or of a Ray that is started on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from common.errors import INTERRUPTED
from common.paths import REPO_ROOT
from common.settings import check_at_least, check_installed
from runner.sweep.backends.base import CONSOLE_LOG, Backend, JobExit, failed_exit, run_job


@dataclass
class RayBackend(Backend):
    """Options of `hydra/launcher=ray`.

    Without `workers` as many jobs run at the same time as the cluster has CPUs and GPUs for.
    """

    address: Optional[str] = None  # null: start Ray on this machine; auto: the cluster of this machine; host:port
    num_cpus: float = 1  # CPUs that one job takes
    num_gpus: float = 0  # GPUs that one job takes

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("hydra.launcher.num_cpus", self.num_cpus, 0, example=1)
        check_at_least("hydra.launcher.num_gpus", self.num_gpus, 0, example=1)

    def check_available(self) -> None:
        check_installed("ray", "hydra/launcher=ray")

    def open(self, sweep_dir: Path) -> None:
        import ray

        ray.init(
            address=self.address,
            runtime_env={"env_vars": {"PYTHONPATH": str(REPO_ROOT)}},  # workers import this repository
            include_dashboard=False if self.address is None else None,
            logging_level="WARNING",
        )
        self._run = ray.remote(run_job).options(num_cpus=self.num_cpus, num_gpus=self.num_gpus, max_retries=0)

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> Any:
        return self._run.remote(command, env, run_dir / CONSOLE_LOG)

    def poll(self, handle: Any) -> JobExit | None:
        import ray

        ready, _ = ray.wait([handle], timeout=0)
        if not ready:
            return None
        try:
            return JobExit(ray.get(handle)[0])
        except ray.exceptions.TaskCancelledError:
            return JobExit(INTERRUPTED)
        except ray.exceptions.RayError as error:
            return failed_exit(error, "ray")

    def cancel(self, handle: Any) -> None:
        import ray

        ray.cancel(handle)  # SIGINT in the worker, which `run_job` forwards

    def close(self) -> None:
        import ray

        ray.shutdown()
