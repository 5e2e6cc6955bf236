"""Actions in a forked process that is killed at its n-th change of the file system: just before it, or for a new file
just after it was created.

The processes are forks of the process that has imported torch (`warm_programs.py`), which run this file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warm_programs import WarmPrograms

ROOT = Path(__file__).parents[2]
KILLED = 137
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
CREATES = os.O_CREAT | os.O_TRUNC
TIMEOUT = 500  # seconds


class KilledCalls:
    """Runs the actions below, each in a process of its own."""

    def __init__(self, warm: WarmPrograms, folder: Path) -> None:
        self._warm, self._folder = warm, folder

    def run(
        self, action: str, *arguments: object, root: Path, kill_at: int = -1, after_creation: bool = False
    ) -> tuple[int, int, str]:
        """Run one of ACTIONS, and kill its process at change number `kill_at` below `root` (-1: never).

        Return (exit code, number of changes, output). With `after_creation` a file that would be created exists, empty.
        """
        counted, output = self._folder / "changes.txt", self._folder / "output.txt"
        request = [
            action,
            [str(each) if isinstance(each, Path) else each for each in arguments],
            str(root),
            kill_at,
            after_creation,
        ]
        counted.unlink(missing_ok=True)
        process = self._warm.start(Path(__file__), json.dumps(request), str(counted), cwd=self._folder, out=output)
        code = process.wait(TIMEOUT)
        return code, int(counted.read_text() if counted.exists() else 0), output.read_text()


def install_counter(root: Path, kill_at: int, after_creation: bool) -> list[int]:
    """Count the changes below `root` in a list of one number."""
    counter, prefix = [0], str(root)

    def hook(event: str, arguments: tuple) -> None:
        is_open = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if not (is_open or event in CHANGES) or not str(arguments[0]).startswith(prefix):
            return
        if counter[0] == kill_at:
            counter[0] += 1  # the open below is an event, too
            if is_open and after_creation and arguments[2] & CREATES:
                os.close(os.open(arguments[0], os.O_WRONLY | arguments[2] & CREATES))
            os._exit(KILLED)
        counter[0] += 1

    sys.addaudithook(hook)
    return counter


def train(workspace: str, argv: list[str]) -> None:
    from common import paths
    from runner.cli.entrypoint import train_command

    paths.REPO_ROOT = Path(workspace)
    train_command(argv)


def repair(run: str, state: dict[str, Any]) -> None:
    from runner.launch.recovery import recover_run
    from runner.tracking.jsonl import JsonlLog, SavedLogs

    recover_run(Path(run))
    JsonlLog(Path(run) / "metrics.jsonl", 2, SavedLogs.of_state(state)).close()


def start_sweep(script: str, sweep: str) -> None:
    from fake_jobs import run_sweep

    from runner.sweep import command

    command.TRAIN_SCRIPT = script
    command.start_sweep(["seed=1,2", f"hydra.sweep.dir={sweep}"], {"--multirun": True}, run_sweep)


def resume_sweep(script: str, sweep: str) -> None:
    from fake_jobs import run_sweep

    from runner.sweep import command

    command.TRAIN_SCRIPT = script
    command.resume_sweep(Path(sweep), [], {}, run_sweep)


ACTIONS: dict[str, Callable[..., None]] = {
    "train": train,
    "repair": repair,
    "start_sweep": start_sweep,
    "resume_sweep": resume_sweep,
}


def main(request: str, counted: str) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "sweep"))  # fake_jobs
    from runner.run_dir import contents

    contents.git_state = lambda root=ROOT: {"commit": None, "dirty": None}
    action, arguments, root, kill_at, after_creation = json.loads(request)
    counter = install_counter(Path(root), kill_at, after_creation)
    try:
        ACTIONS[action](*arguments)
    finally:
        Path(counted).write_text(str(counter[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
