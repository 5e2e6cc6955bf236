"""Section `tracker` of the config: the base class of every tracker's settings, and the registry of trackers."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from typing import ClassVar

from common.errors import UserError, did_you_mean, one_line
from common.registry import Registry
from common.settings import CheckedSettings, check_installed, one_of, settings_class
from runner.tracking.lines import CONSOLE_MODES

TRACKERS: Registry[type[TrackerConfig]] = Registry("tracker", "runner.tracking.trackers", helpers=("program",))
PROJECT_NAME = re.compile(r"[0-9a-zA-Z_+.-]{1,100}")  # what SwanLab and wandb accept


@TRACKERS.register("none")
@settings_class
class TrackerConfig(CheckedSettings):
    """Settings of all trackers, and the config of `tracker=none`.

    An external tracker extends it with its own settings and `command()`.
    """

    SECTION = "tracker"
    ON_RESUME = "ignored"
    HAS_PROJECTS: ClassVar[bool] = True  # whether the tracker reads `project` and `mode`, if it has them
    PACKAGE: ClassVar[str] = ""  # that the tracker needs, and the extra in pyproject.toml with it

    name: str  # none, a module of runner/tracking/trackers/, or a tracker that a plugin registers
    page: bool  # write report.html of the run while it trains, in at most 0.5 % of its time
    # auto (progress bar on a terminal, otherwise one line per train.log_every), rich, plain, json (an object per line)
    # or quiet
    console: str = one_of(*CONSOLE_MODES)

    def command(self) -> list[str] | None:
        """Return the command of the tracker's process, which reads messages on stdin (see tracker_process.py); None: no
        tracker.
        """
        return None

    def check_installed(self) -> None:
        """Raise UserError with the install command if the package that the tracker needs is not installed."""
        if self.PACKAGE:
            fix = f"pip install 'lm-runner[{self.PACKAGE}]', or tracker=none"
            check_installed(self.PACKAGE, f"tracker={self.PACKAGE}", fix)

    def selected(self) -> list[TrackerConfig]:
        """Return the settings of each tracker that the run reports to."""
        return [] if self.name == "none" else [self]


@settings_class
class ExternalTrackerConfig(TrackerConfig):
    """Settings of trackers that can be combined.

    `project` and `mode` are those of each service among them.
    """

    also: list[str]  # further trackers of the run, e.g. [tensorboard]
    project: str  # project of SwanLab and wandb
    # of SwanLab and wandb: auto (online if there is an API key and the server answers, otherwise offline), online or
    # offline
    mode: str = one_of("auto", "online", "offline")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not PROJECT_NAME.fullmatch(self.project):
            message = f"tracker.project must be 1 to 100 letters, digits or _-+., got {one_line(self.project)!r}"
            raise UserError(message, f"tracker.project={self.project}", "e.g. tracker.project=training")
        names = [name for name in TRACKERS.names() if name != "none"] if self.also else []
        for name in self.also:
            if name not in names:
                fix = did_you_mean(name, names, "e.g. tracker.also=[tensorboard]")
                raise UserError(
                    f"tracker.also must name trackers out of {', '.join(names)}, got {name}",
                    f"tracker.also=[{name}]",
                    fix,
                )
        name, count = Counter([self.name, *self.also]).most_common(1)[0]
        if count > 1:
            raise UserError(
                f"tracker.also names the tracker {name} a second time",
                f"tracker={self.name} tracker.also=[{','.join(self.also)}]",
                "name it once",
            )

    def command(self) -> list[str] | None:
        # -P: trackers/wandb.py must not be imported as `wandb`
        return [sys.executable, "-P", "-m", type(self).__module__]

    def selected(self) -> list[TrackerConfig]:
        return [self, *map(self._config_of, self.also)]

    def _config_of(self, name: str) -> TrackerConfig:
        """Return the settings of a tracker in `also`: the same as here, and its own defaults."""
        cls, given = TRACKERS.get(name), {**vars(self), "name": name, "also": []}
        settings = dataclasses.fields(cls)
        for setting in settings:
            if setting.name not in given and setting.default is setting.default_factory is dataclasses.MISSING:
                raise UserError(
                    f"the tracker {name} needs the setting {setting.name}, which tracker={self.name} does not have",
                    f"tracker.also=[{name}]",
                    f"give {setting.name} a default in {cls.__name__}",
                )
        return cls(**{setting.name: given[setting.name] for setting in settings if setting.name in given})
