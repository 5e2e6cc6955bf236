"""Who we are among how many: the only room that knows about other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class DistributedConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name != "single":
            raise ValueError("unknown way to distribute", f"distributed.name={self.name}", "choose single")


@dataclass(frozen=True)
class World:
    """The ranks of one training. One rank only, so far: `leads` marks the one that prints and writes."""

    rank: int
    size: int
    device: torch.device

    def sum(self, number: int | float) -> int | float:
        """Over all ranks; every rank gets the same."""
        return number

    @property
    def leads(self) -> bool:
        return self.rank == 0


def join_world(device: str) -> World:
    """`device` is auto, cpu, cuda or cuda:1; auto takes a GPU where there is one."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError("unknown device", f"device={device}", "choose auto, cpu, cuda or cuda:<number>")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"this machine shows torch {torch.cuda.device_count()} CUDA devices", f"device={device}", "use device=cpu, or device=auto to take what there is"
        )
    return World(0, 1, torch.device(device))
