"""`hydra/launcher=local`: jobs as processes on this machine, which is divided among them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.guarded_files import open_append
from runner.engine.device.cpu.threads import THREADS_ENV, available_cores
from runner.launch import subprocesses
from runner.sweep.backends.base import CONSOLE_LOG, JobExit, LauncherOptions


@dataclass
class LocalOptions(LauncherOptions):
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
        make_slots(self.workers, self.devices)

    def make_backend(self, sweep_dir: Path) -> LocalBackend:
        return LocalBackend(make_slots(self.workers, self.devices))


@dataclass
class Slot:
    """The share of the machine that one job gets."""

    threads: int | None  # None: torch's default
    devices: list[str] | None  # None: all


@dataclass
class LocalJob:
    process: subprocess.Popen
    slot: Slot


class LocalBackend:
    def __init__(self, slots: list[Slot]) -> None:
        self.capacity: int | None = len(slots)
        self._free = list(slots)

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> LocalJob:
        slot = self._free.pop(0)
        env = subprocesses.child_env() | {"PYTHONUNBUFFERED": "1"} | env
        if slot.threads:
            env |= {"OMP_NUM_THREADS": str(slot.threads), THREADS_ENV: str(slot.threads)}
        if slot.devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
        with open_append(run_dir / CONSOLE_LOG) as out:
            return LocalJob(subprocesses.spawn(command, env, out.fileno()), slot)

    def poll(self, handle: LocalJob) -> JobExit | None:
        code = handle.process.poll()
        if code is None:
            return None
        self._free.append(handle.slot)
        return JobExit(code)

    def cancel(self, handle: LocalJob) -> None:
        handle.process.terminate()

    def close(self) -> None: ...


def make_slots(workers: int | None, devices: Sequence[Any] | None) -> list[Slot]:
    """Divide devices and cores among `workers`. Raises UserError if a device would stay unused."""
    names = [str(device) for device in devices or []]
    count = workers or len(names) or 1
    if len(names) > count and len(names) % count:  # a worker with more GPUs than another would train differently
        raise UserError(
            f"{len(names)} devices cannot be divided evenly among {count} workers",
            f"hydra.launcher.devices=[{','.join(names)}] hydra.launcher.workers={count}",
            f"hydra.launcher.workers={len(names)}, or give {len(names) // count * count} devices",
        )
    per_worker = max(1, len(names) // count)
    # each torch process takes all cores by default: two of them would wait for each other
    threads = None if count == 1 or "OMP_NUM_THREADS" in os.environ else max(1, available_cores() // count)
    return [
        Slot(threads, [names[(worker * per_worker + i) % len(names)] for i in range(per_worker)] if names else None)
        for worker in range(count)
    ]


def _is_device(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and bool(value))
