"""The SwanLab mirror: reads a run's messages on standard input and repeats them to SwanLab.

A program of its own (see mirror.py). SwanLab buffers its records and writes them when it finishes, so a trainer that is killed would
leave an unreadable file; this process sees the end of its input instead, and finishes the record as crashed.
"""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import swanlab

PROBE_SECONDS = 3
FINISH_TIMEOUT = 60  # an upload that hangs ends with the process; the offline files stay
SWANLAB_STATES = {"completed": "success", "interrupted": "aborted", "failed": "crashed"}


def choose_mode(wanted: str, api_key: str | None, api_host: str) -> tuple[str, str]:
    """(mode, why). `auto` is online only where a key exists and the server answers: SwanLab itself waits 16 s and then raises."""
    if wanted != "auto":
        return wanted, f"tracker.mode={wanted}"
    if not api_key:
        return "offline", "no API key"
    try:
        urllib.request.urlopen(api_host, timeout=PROBE_SECONDS)
    except urllib.error.HTTPError:
        pass  # any answer is an answer
    except OSError:
        return "offline", f"{api_host} does not answer"
    return "online", "API key found"


def open_experiment(start: dict[str, Any]) -> tuple[swanlab.Run, str]:
    """(run, one line that says where it is recorded)."""
    import swanlab

    settings = swanlab.Settings(
        interactive=False,
        log_dir=start["folder"],
        terminal=swanlab.Settings.Terminal(proxy_type="none"),
        # This process is not the run: its command, packages and load would be recorded as the run's.
        probe=swanlab.Settings.Probe(monitor=False, requirements=False, git=False, runtime=False),
    )
    mode, why = choose_mode(start["mode"], settings.api_key, settings.api_host)
    run = swanlab.init(project=start["project"], name=start["name"], id=start["id"], resume="allow", config=start["config"], mode=mode, settings=settings)
    return run, f"swanlab: {mode} ({why}), {run.url if mode == 'online' else run.dir}"


def forward(run: swanlab.Run, message: dict[str, Any]) -> None:
    if message["verb"] == "log":
        run.log({f"{message['kind']}/{name}": value for name, value in message["numbers"].items()}, step=message["step"])
    else:
        samples = message["samples"]
        run.log_text(key="samples", data=[sample["answer"] for sample in samples], caption=[sample["prompt"] for sample in samples], step=message["step"])


def main() -> None:
    words = sys.stdout
    sys.stdout = sys.stderr  # SwanLab's greetings belong in the log; our own lines reach the console of the run
    run, where = open_experiment(json.loads(sys.stdin.readline()))
    print(where, file=words, flush=True)
    status, error = "failed", "the training process ended without saying why"
    for line in sys.stdin:
        message = json.loads(line)
        if message["verb"] == "finish":
            status, error = message["status"], message["error"]
            break
        forward(run, message)
    signal.alarm(FINISH_TIMEOUT)
    run.finish(SWANLAB_STATES[status], error=error or None)


if __name__ == "__main__":
    main()
