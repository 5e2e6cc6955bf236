"""Where the jobs of a sweep run: local processes, submitit (Slurm), Ray."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Optional

from common.errors import FAILED, INTERRUPTED, UserError
from common.guarded_files import open_append
from common.paths import REPO_ROOT
from common.settings import check_at_least, check_choice, check_installed
from runner.engine.device.cpu import THREADS_ENV, available_cores
from runner.engine.device.signals import handled_signals
from runner.launch import subprocesses
from runner.launch.fork_server import ForkedProcess, ForkServer, ServerLostError
from runner.run_dir.lock import is_locked

CONSOLE_LOG = "console.log"  # output of a job, all its attempts; in its run directory


@dataclass
class JobExit:
    """How a job ended. `reason` is set where the backend knows more than the exit code."""

    code: int
    reason: str | None = None


@dataclass
class Backend:
    """Options of every `hydra/launcher`, and how it runs jobs.

    A job is the command line of a process in `run_dir`, which exists; its output goes to `run_dir/console.log`. Each
    backend has `submit`, `poll` and `cancel` of its own.
    """

    _target_: str = "hydra_plugins.lm_runner.JobLauncher"
    workers: Optional[int] = None  # jobs at the same time, 1 or more
    fail_fast: bool = False  # stop the sweep at the first job that failed
    retries: int = 0  # how often a failed job is tried again from its newest checkpoint; a diverged one is not
    START_ERRORS: ClassVar[tuple[type[Exception], ...]] = ()  # of `open`, for options that the package refuses

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_at_least("hydra.launcher.workers", self.workers, 1, example=2)
        check_at_least("hydra.launcher.retries", self.retries, 0, example=1)
        self.capacity: float = self.workers or math.inf  # jobs at the same time

    def check_available(self) -> None:
        """Raise UserError if the package of the backend is missing."""

    def start(self, sweep_dir: Path) -> None:
        """Call `open`. Raises UserError if the package of the backend refuses the options."""
        try:
            self.open(sweep_dir)
        except self.START_ERRORS as error:
            raise UserError(
                f"the launcher cannot start: {error}",
                "hydra/launcher",
                "correct the options hydra.launcher.*, or choose hydra/launcher=local",
            ) from error

    def open(self, sweep_dir: Path) -> None:
        """Get ready for the jobs of the sweep in `sweep_dir`."""

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> Any:
        """Start `python *command` with `env` added to the environment and return a handle."""
        raise NotImplementedError

    def poll(self, handle: Any) -> JobExit | None:
        """Return how the job ended, or None while it runs."""
        raise NotImplementedError

    def cancel(self, handle: Any) -> None:
        """Ask the job to save and exit."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` has taken; all jobs have ended."""


def failed_exit(error: Exception, prefix: str) -> JobExit:
    """Return the end of a job that a cluster could not run, with the last line of its error.

    submitit adds rules, and the paths of its logs to a trace.
    """
    text = str(error).partition("You can check full logs")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip("- ")]
    return JobExit(FAILED, f"{prefix}: {lines[-1] if lines else type(error).__name__}")


def start_job(command: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    """Start `python *command` with its output in `log`."""
    with open_append(log) as out:
        return subprocesses.spawn(command, env, out.fileno())


def run_job(command: list[str], env: dict[str, str], log: Path) -> tuple[int, list[int]]:
    """Run `python *command` until it ends, in a worker of a cluster; return its exit code and the signals that arrived
    meanwhile.

    The first signal asks the job to save and exit. The job is a process of its own: one that runs out of memory does
    not kill the worker.
    """
    received: list[int] = []
    process: subprocess.Popen | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if process is not None and not received:
            process.terminate()
        received.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # Python delivers signals to the main thread only
    previous = {
        number: signal.signal(number, forward) for number in ((*handled_signals(), signal.SIGUSR2) if is_main else ())
    }
    try:
        if received:
            return INTERRUPTED, received
        process = start_job(command, env, log)
        if received:  # arrived while the process was being started
            process.terminate()
        # not wait(): Ray sets the signal within the process, which interrupts no system call
        while process.poll() is None:
            time.sleep(subprocesses.POLL_SECONDS)
        return process.returncode, received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass
class LocalBackend(Backend):
    """Options of `hydra/launcher=local`. Without `workers` one job runs per device, or one."""

    # list of GPUs that are divided among the workers, e.g. [0,1]; numbers or the names of nvidia-smi -L
    devices: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_list = isinstance(self.devices, Sequence) and not isinstance(self.devices, str)
        if self.devices is not None and not (is_list and self.devices and all(map(_is_device, self.devices))):
            fix = (
                f"'hydra.launcher.devices=[{self.devices}]'"
                if _is_device(self.devices)
                else "e.g. 'hydra.launcher.devices=[0,1]'"
            )
            raise UserError(
                f"hydra.launcher.devices must be a list of devices, got {self.devices}",
                f"hydra.launcher.devices={self.devices}",
                fix,
            )
        self._free = make_slots(self.workers, self.devices)
        self._forks = ForkServer()
        self.capacity = len(self._free)

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> LocalJob:
        slot = self._free.pop(0)
        env = env | slot
        with open_append(run_dir / CONSOLE_LOG) as out:
            process = self._forks.start(command, env, out.fileno()) or subprocesses.spawn(command, env, out.fileno())
        return LocalJob(process, slot, run_dir, command, env)

    def poll(self, handle: LocalJob) -> JobExit | None:
        try:
            code = handle.process.poll()
        except ServerLostError:  # the job saves; it continues as a process of its own
            code = None
            if not is_locked(handle.run_dir):
                if handle.is_canceled:
                    code = INTERRUPTED
                else:
                    handle.process = start_job(handle.command, handle.env, handle.run_dir / CONSOLE_LOG)
        if code is None:
            return None
        self._free.append(handle.slot)
        return JobExit(code)

    def cancel(self, handle: LocalJob) -> None:
        handle.is_canceled = True
        handle.process.terminate()

    def close(self) -> None:
        self._forks.close()


@dataclass
class LocalJob:
    process: subprocess.Popen | ForkedProcess
    slot: dict[str, str]
    run_dir: Path
    command: list[str]
    env: dict[str, str]
    is_canceled: bool = False


def make_slots(workers: int | None, devices: Sequence[Any] | None) -> list[dict[str, str]]:
    """Divide devices and cores among `workers`; return the variables that give each worker its share.

    Raises UserError if a device would stay unused.
    """
    names = [_device_name(device) for device in devices or []]
    count = workers or len(names) or 1
    if len(names) > count and len(names) % count:  # a worker with more GPUs than another would train differently
        raise UserError(
            f"{len(names)} devices cannot be divided evenly among {count} workers",
            f"hydra.launcher.devices=[{','.join(names)}] hydra.launcher.workers={count}",
            f"hydra.launcher.workers={len(names)}, or give {len(names) // count * count} devices",
        )
    per_worker = max(1, len(names) // count)
    shared = {}
    # each torch process takes all cores by default: two of them would wait for each other
    if count > 1 and "OMP_NUM_THREADS" not in os.environ:
        shared = dict.fromkeys(("OMP_NUM_THREADS", THREADS_ENV), str(max(1, available_cores() // count)))
    if not names:
        return [shared] * count
    shares = ([names[(worker * per_worker + i) % len(names)] for i in range(per_worker)] for worker in range(count))
    return [shared | {"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _device_name(device: Any) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls a device. A number counts the GPUs that this process may use, as in torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not isinstance(device, int):
        return str(device)
    # CUDA ignores what follows an invalid name; CUDA_VISIBLE_DEVICES=-1 hides all
    names = list(takewhile(lambda name: name and name[0] != "-", map(str.strip, visible.split(","))))
    if device >= len(names):
        raise UserError(
            f"hydra.launcher.devices has device {device}, but CUDA_VISIBLE_DEVICES={visible} leaves {len(names)}",
            f"hydra.launcher.devices={device}",
            "numbers count the visible devices from 0; or change CUDA_VISIBLE_DEVICES",
        )
    return names[device]


def _is_device(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and bool(value))


@dataclass
class RayBackend(Backend):
    """Options of `hydra/launcher=ray`.

    Without `workers` as many jobs run at the same time as the cluster has CPUs and GPUs for.
    """

    address: Optional[str] = None  # null: start Ray on this machine; auto: the cluster of this machine; host:port
    num_cpus: float = 1  # CPUs that one job takes
    num_gpus: float = 0  # GPUs that one job takes
    START_ERRORS = (ValueError, ConnectionError)

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
    START_ERRORS = (NameError, TypeError, ValueError)

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


LAUNCHERS = {"local": LocalBackend, "submitit": SubmititBackend, "ray": RayBackend}  # options of hydra/launcher
