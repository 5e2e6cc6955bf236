"""Autocast, loss scaling, clipping and the update: the only room that knows a dtype."""
from __future__ import annotations

from dataclasses import dataclass

NAMES = ("fp32", "bf16", "fp16")


@dataclass
class PrecisionConfig:
    name: str

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError("unknown precision", f"precision.name={self.name}", f"choose one of {', '.join(NAMES)}")
