"""Who we are among how many: the only room that knows about other processes."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DistributedConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name != "single":
            raise ValueError("unknown way to distribute", f"distributed.name={self.name}", "choose single")
