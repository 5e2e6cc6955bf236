"""`hydra/launcher=local`: jobs as processes on this machine, which is divided among them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from common.errors import UserError
from runner.engine.device.cpu.threads import THREADS_ENV, available_cores
from runner.sweep.backends.base import CONSOLE_LOG, Backend, JobExit, start_job


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
        self.capacity = len(self._free)

    def submit(self, run_dir: Path, command: list[str], env: dict[str, str]) -> LocalJob:
        slot = self._free.pop(0)
        return LocalJob(start_job(command, env | slot, run_dir / CONSOLE_LOG), slot)

    def poll(self, handle: LocalJob) -> JobExit | None:
        code = handle.process.poll()
        if code is None:
            return None
        self._free.append(handle.slot)
        return JobExit(code)

    def cancel(self, handle: LocalJob) -> None:
        handle.process.terminate()


@dataclass
class LocalJob:
    process: subprocess.Popen
    slot: dict[str, str]


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
