"""Where the numbers of a run go: the console, metrics.jsonl, and mirrors that can never stop training."""
from __future__ import annotations

from dataclasses import dataclass

CONSOLES = ("auto", "rich", "plain", "quiet")
MODES = ("auto", "online", "offline")


@dataclass
class TrackerConfig:
    name: str  # none | swanlab
    project: str
    mode: str  # auto: online where a key and the network are at hand, else offline
    console: str  # auto: a progress bar on a terminal, one line per log_every when piped

    def __post_init__(self) -> None:
        if self.name not in ("none", "swanlab"):
            raise ValueError("unknown tracker", f"tracker.name={self.name}", "choose none or swanlab")
        if self.mode not in MODES:
            raise ValueError("unknown tracker mode", f"tracker.mode={self.mode}", f"choose one of {', '.join(MODES)}")
        if self.console not in CONSOLES:
            raise ValueError("unknown console", f"tracker.console={self.console}", f"choose one of {', '.join(CONSOLES)}")
