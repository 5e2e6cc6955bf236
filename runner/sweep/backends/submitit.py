"""`hydra/launcher=submitit`: jobs through submitit's executor, on Slurm or, to try it out, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from common.errors import INTERRUPTED, UserError
from common.paths import REPO_ROOT
from common.settings import check_choice, check_installed
from runner.sweep.backends.base import CONSOLE_LOG, Backend, JobExit, failed_exit, run_job


@dataclass
class SubmititBackend(Backend):
    """Options of `hydra/launcher=submitit`. `workers` jobs are in the queue or running at the same time."""

    workers: Optional[int] = 8
    cluster: str = "slurm"  # slurm; local: as Slurm would, on this machine; debug: in this process
    timeout_min: int = 1440  # minutes; then the job saves and goes back into the queue
    signal_delay_s: int = 120  # seconds before the timeout at which the job is asked to save (Slurm)
    max_num_timeout: int = 1000  # how often a job goes back into the queue after a timeout
    cpus_per_task: int = 4  # CPU cores of a job
    gpus_per_node: int = 1  # GPUs of a job
    mem_gb: Optional[float] = None  # memory of a job in GiB; null: the cluster's default
    partition: Optional[str] = None  # Slurm partition; null: the cluster's default
    account: Optional[str] = None  # Slurm account; null: the user's default
    parameters: dict[str, Any] = field(default_factory=dict)  # more of submitit's parameters, e.g. {slurm_qos: high}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("hydra.launcher.cluster", self.cluster, ("slurm", "local", "debug"))

    def check_available(self) -> None:
        check_installed("submitit", "hydra/launcher=submitit")
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            fix = "run the command on a login node of the cluster; hydra.launcher.cluster=local runs the jobs here"
            raise UserError(
                "hydra.launcher.cluster=slurm needs the command sbatch, which is not on this machine",
                "hydra.launcher.cluster=slurm",
                fix,
            )

    def open(self, sweep_dir: Path) -> None:
        import submitit

        # workers import this repository
        os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # submitit unpickles files of its folder: a new folder for each launch, so that no file which another program
        # has put there is read
        folder = sweep_dir / ".submitit" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        folder.mkdir(parents=True)
        limits = {f"{name}_max_num_timeout": self.max_num_timeout for name in ("slurm", "local")}
        self._executor = submitit.AutoExecutor(folder, cluster=self.cluster, **limits)
        self._executor.update_parameters(
            timeout_min=self.timeout_min,
            cpus_per_task=self.cpus_per_task,
            gpus_per_node=self.gpus_per_node,
            mem_gb=self.mem_gb,
            slurm_partition=self.partition,
            slurm_account=self.account,
            slurm_signal_delay_s=self.signal_delay_s,
            **self.parameters,
        )

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> Any:
        self._executor.update_parameters(name=run_dir.name[:64])
        return self._executor.submit(JobCommand(command, env, run_dir / CONSOLE_LOG))

    def poll(self, handle: Any) -> JobExit | None:
        if not handle.done():
            return None
        try:
            return JobExit(int(handle.result()))
        except Exception as error:  # submitit raises what its worker raised, and several classes of its own
            return failed_exit(error, f"submitit job {handle.job_id} ({handle.state})")

    def cancel(self, handle: Any) -> None:
        if self.cluster == "local":
            os.kill(int(handle.job_id), signal.SIGTERM)  # handle.cancel() would leave the job one second to save
        else:
            handle.cancel(check=False)  # scancel: SIGTERM, and SIGKILL after Slurm's KillWait


@dataclass
class JobCommand:
    """What submitit pickles and calls in its worker.

    After a timeout or a preemption submitit puts it into the queue again.
    """

    command: list[str]
    env: dict[str, str]
    log: Path

    def __call__(self) -> int:
        code, signals = run_job(self.command, self.env, self.log)
        if code == INTERRUPTED and signal.SIGUSR2 in signals:
            signal.raise_signal(signal.SIGUSR2)  # the job has saved: let submitit's handler put it into the queue again
        return code

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
