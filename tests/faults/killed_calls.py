"""Actions in a forked process that is killed at its n-th change of the file system: just before it, or for a new file
just after it was created.

The processes are forked from a server without threads, `python killed_calls.py`: a process that has trained cannot be
forked safely.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KILLED = 137
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
CREATES = os.O_CREAT | os.O_TRUNC


def run_in_fork(
    action: Callable[[], object], root: Path, kill_at: int = -1, after_creation: bool = False
) -> tuple[int, int, str]:
    """Run `action` in a forked process, and kill it at change number `kill_at` below `root` (-1: never).

    Return (exit code, number of changes, output). With `after_creation` a file that would be created exists, empty.
    """
    reader, writer = os.pipe()
    output = Path.cwd() / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            counter = install_counter(root, kill_at, after_creation)
            try:
                action()
                code = 0
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 0
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writer, str(counter[0]).encode())
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader) as pipe:
        changes = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), int(changes or 0), output.read_text()


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


class ForkServer:
    """Runs the actions below, each in a process of its own."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def run(
        self, action: str, *arguments: object, root: Path, kill_at: int = -1, after_creation: bool = False
    ) -> tuple[int, int, str]:
        """Return what `run_in_fork` returns for one of ACTIONS."""
        assert self._process.stdin and self._process.stdout
        request = [
            action,
            [str(each) if isinstance(each, Path) else each for each in arguments],
            str(root),
            kill_at,
            after_creation,
        ]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code, changes, output = json.loads(self._process.stdout.readline())
        return code, changes, output


@contextmanager
def fork_server(cwd: Path) -> Iterator[ForkServer]:
    search = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests", "tests/sweep"))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield ForkServer(process)
        finally:
            process.kill()


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


def serve() -> None:
    for module in ("runner.launch.run", "runner.engine.build", "runner.sweep.command", "runner.train"):
        importlib.import_module(module)  # once, before the forks
    from runner.checkpoint.compatibility import code_fingerprint
    from runner.run_dir import contents

    code_fingerprint()  # cached: this checkout may change meanwhile
    contents.git_state = lambda root=ROOT: {"commit": None, "dirty": None}
    for line in sys.stdin:
        action, arguments, root, kill_at, after_creation = json.loads(line)
        result = run_in_fork(partial(ACTIONS[action], *arguments), Path(root), kill_at, after_creation)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    serve()
