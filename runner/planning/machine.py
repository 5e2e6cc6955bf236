"""What this machine has: memory of the device and free disk, and the memory of this process."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from common.limits import MEMINFO, machine_memory, peak_resident_bytes
from common.paths import outputs_dir


@dataclass(frozen=True)
class Machine:
    device: str  # cpu or cuda
    device_name: str
    memory: int  # bytes of the device, or of the machine, its container or ulimit
    available: int  # bytes that other programs leave now
    free_disk: int  # bytes where outputs/ is


def this_machine(device: str) -> Machine:
    """`device`: as in the setting."""
    import torch

    outputs = outputs_dir()
    existing = next(folder for folder in (outputs, *outputs.parents) if folder.exists())
    free_disk = shutil.disk_usage(existing).free
    if device == "cpu" or not torch.cuda.is_available():
        memory = machine_memory()
        return Machine(
            "cpu", f"CPU, {torch.get_num_threads()} threads", memory, min(memory, available_memory()), free_disk
        )
    number = int(device.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(number)
    return Machine("cuda", torch.cuda.get_device_name(number), total, free, free_disk)


def available_memory() -> int:
    """Return the bytes that the system can give to programs without ending others (MemAvailable of Linux); on other
    systems all memory.
    """
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return machine_memory()


def resident_bytes() -> int:
    """Return the memory of this process now, its peak where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()
