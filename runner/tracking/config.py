"""Section `tracker` of the config: the base class of every tracker's settings, and the registry of trackers."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from common.errors import UserError
from common.registry import Registry
from runner.tracking.console import CONSOLE_MODES

TRACKERS: Registry[type[TrackerConfig]] = Registry("tracker", "runner.tracking.trackers")


@TRACKERS.register("none")
@dataclass
class TrackerConfig:
    """Settings of all trackers, and the config of `tracker=none`. An external tracker extends it with its own settings and `command()`."""

    ON_RESUME = "ignored"

    name: str  # none, a module of runner/tracking/trackers/, or a tracker that a plugin registers
    page: bool  # write report.html of the run while it trains, in at most 0.5 % of its time
    console: str  # auto (progress bar on a terminal, otherwise one line per train.log_every), rich, plain or quiet

    def __post_init__(self) -> None:
        if self.console not in CONSOLE_MODES:
            raise UserError(
                f"tracker.console must be one of {', '.join(CONSOLE_MODES)}, got {self.console}", f"tracker.console={self.console}", "e.g. tracker.console=auto"
            )

    def command(self) -> list[str] | None:
        """Return the command of the tracker's process, which reads messages on stdin (see tracker_process.py); None: no tracker."""
        return None

    def check_installed(self) -> None:
        """Raise UserError if a package that the tracker needs is not installed."""


def require_package(name: str, extra: str) -> None:
    """Raise UserError with the install command if the package that `tracker=extra` needs cannot be imported."""
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"tracker={extra} needs the package {name}, which is not installed", f"tracker={extra}", f"pip install 'lm-runner[{extra}]', or tracker=none"
        )
