"""SwanLab tracker: its settings, and the process that reads a run's messages on stdin and forwards them to SwanLab.

SwanLab writes its buffer only when it finishes, so a trainer that is killed would leave an unreadable file; this process sees the end
of its stdin instead and finishes the record as crashed.
"""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from runner.tracking.config import TRACKERS, TrackerConfig, require_package

if TYPE_CHECKING:
    import swanlab

MODES = ("auto", "online", "offline")
PROBE_TIMEOUT = 3  # seconds
FINISH_TIMEOUT = 60  # seconds; an upload that hangs longer ends with the process, and the offline files stay
SWANLAB_STATES = {"completed": "success", "interrupted": "aborted", "failed": "crashed"}


@TRACKERS.register("swanlab")
@dataclass
class SwanlabConfig(TrackerConfig):
    project: str  # SwanLab project
    mode: str  # auto (online if an API key and the server are available, otherwise offline), online or offline

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise UserError(f"tracker.mode must be one of {', '.join(MODES)}, got {self.mode}", f"tracker.mode={self.mode}", "e.g. tracker.mode=auto")

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", __spec__.name]  # -P: this file must not be imported as `swanlab`

    def check_installed(self) -> None:
        require_package("swanlab", extra="swanlab")


def choose_mode(requested: str, api_key: str | None, api_host: str) -> tuple[str, str]:
    """Return (mode, reason). `auto` is online only if a key exists and the server answers: SwanLab itself waits 16 s and then raises."""
    if requested != "auto":
        return requested, f"tracker.mode={requested}"
    if not api_key:
        return "offline", "no API key"
    try:
        urllib.request.urlopen(api_host, timeout=PROBE_TIMEOUT)
    except urllib.error.HTTPError:
        pass  # an HTTP error is an answer, too
    except OSError:
        return "offline", f"{api_host} does not answer"
    return "online", "API key found"


def open_experiment(start: dict[str, Any]) -> tuple[swanlab.Run, str]:
    """Return (SwanLab run, console line with mode and location)."""
    import swanlab

    settings = swanlab.Settings(
        interactive=False,
        log_dir=start["folder"],
        terminal=swanlab.Settings.Terminal(proxy_type="none"),
        # Off: SwanLab would record the command, packages and load of this process as those of the run.
        probe=swanlab.Settings.Probe(monitor=False, requirements=False, git=False, runtime=False),
    )
    mode, reason = choose_mode(start["settings"]["mode"], settings.api_key, settings.api_host)
    project = start["settings"]["project"]
    run = swanlab.init(project=project, name=start["name"], id=start["id"], resume="allow", config=start["config"], mode=mode, settings=settings)
    return run, f"swanlab: {mode} ({reason}), {run.url if mode == 'online' else run.dir}"


def forward(run: swanlab.Run, message: dict[str, Any]) -> None:
    if message["event"] == "log":
        run.log({f"{message['kind']}/{name}": value for name, value in message["numbers"].items()}, step=message["step"])
    else:
        samples = message["samples"]
        run.log_text(key="samples", data=[sample["answer"] for sample in samples], caption=[sample["prompt"] for sample in samples], step=message["step"])


def forward_stdin() -> None:
    console = sys.stdout
    sys.stdout = sys.stderr  # SwanLab's own output goes to the log file; what this process prints to `console` is shown by the run
    run, location = open_experiment(json.loads(sys.stdin.readline()))
    print(location, file=console, flush=True)
    status, error = "failed", "the training process ended without a final message"
    for line in sys.stdin:
        message = json.loads(line)
        if message["event"] == "finish":
            status, error = message["status"], message["error"]
            break
        forward(run, message)
    signal.alarm(FINISH_TIMEOUT)
    run.finish(SWANLAB_STATES[status], error=error or None)


if __name__ == "__main__":
    forward_stdin()
