"""Programs of this repository in forks of a process that has imported torch: a start takes milliseconds instead of two
to three seconds of processor time.

`warm_programs(root)` starts `python warm_programs.py`, a process without threads that has trained nothing: one that has
cannot be forked safely. Ranks, also those of torchrun, and jobs of a sweep are forked, too. Imports and the start of
the interpreter are not tested so: for those a test starts a cold process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from runner.launch import subprocesses

# scripts that a program of this repository starts as children, all of which import torch
WARM_CHILDREN = ("worker.py", "train.py", "fork_server.py", "trial.py")
IMPORTS = (
    "torch",
    "numpy.ctypeslib",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "tokenizers",
    "runner.train",
    "runner.engine.build",
    "runner.engine.loop",
    "models.decoder",
    "runner.launch.worker",
    "runner.planning.planned_settings",
)
SAMPLE_TOKENIZER = Path(__file__).parents[1] / "data" / "samples" / "tokenizer"
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class ForkedProcess:
    """The methods of Popen that the launchers and tests use.

    `poll_pid` returns the exit code of a pid, None while it runs.
    """

    def __init__(self, pid: int, poll_pid: Callable[[int], int | None]) -> None:
        self.pid, self.returncode, self._poll_pid = pid, None, poll_pid

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._poll_pid(self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPrograms:
    """Starts programs as forks of a server."""

    def __init__(self, server: subprocess.Popen) -> None:
        self._server = server

    def start(
        self, script: Path, *argv: str, cwd: Path, out: Path, err: Path | None = None, env: dict[str, str] | None = None
    ) -> ForkedProcess:
        """Run `python script *argv`, with stdout and stderr in the files `out` and `err` (None: `out`), as Popen would
        start it.
        """
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        pid = self._ask(start=[str(script), *argv], cwd=str(cwd), out=str(out), err=err and str(err), env=environment)
        return ForkedProcess(pid, lambda pid: self._ask(poll=pid))

    def call(self, module: str, function: str, *arguments: str) -> None:
        """Call a function of a module in the server, whose result later forks find in its cache.

        It must start no thread.
        """
        self._ask(call=[module, function, *arguments])

    def _ask(self, **request: Any) -> Any:
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextmanager
def warm_programs(root: Path, *before_torch: Path, **variables: str) -> Iterator[WarmPrograms]:
    """`before_torch`: files of modules that the server imports first; `variables`: of its environment."""
    environment = {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}",
    }
    with subprocess.Popen(
        [sys.executable, __file__, *map(str, before_torch)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            yield WarmPrograms(server)
        finally:
            server.kill()


def serve(search: list[str], before_torch: list[str]) -> None:
    for file in before_torch:
        sys.path.insert(0, str(Path(file).parent))
        importlib.import_module(Path(file).stem)
    for module in IMPORTS:
        importlib.import_module(module)
    keep_what_commands_parse()
    gc.collect()  # garbage collections in a fork leave alone what there is now: they took a third of its time
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer_to(request, search)), flush=True)


def keep_what_commands_parse() -> None:
    """Compose two configs, load the tokenizer of the samples, and compile the template of a page: forks find what that
    has parsed.
    """
    importlib.import_module("composition_cache").install()
    from data.tokenize.tokenizer import Tokenizer
    from runner.config.compose import compose_config
    from runner.reporting import page_kit

    for stage in ("pretrain", "sft"):
        compose_config([f"stage={stage}"])
    page_kit._environment().get_template("run.jinja")
    assert Tokenizer.load(SAMPLE_TOKENIZER).tokens_fingerprint  # which it keeps


def answer_to(request: dict[str, Any], search: list[str]) -> int | None:
    if "call" in request:
        module, function, *arguments = request["call"]
        getattr(importlib.import_module(module), function)(*arguments)
        return None
    if "poll" in request:
        return poll_pid(request["poll"])
    return fork(request["start"], request["env"], search, request["cwd"], request["out"], request["err"])


def poll_pid(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def fork(
    program: list[str],
    environment: dict[str, str],
    search: list[str],
    cwd: str | None,
    out: str | int | None,
    err: str | None = None,
    is_child: bool = False,
    stdin: int = subprocess.DEVNULL,
    new_session: bool = False,
) -> int:
    """Return the pid of a fork that runs `python *program`; a child of such a program as `subprocesses.spawn` starts it."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        if new_session:  # and no socket of the parent, as Popen would start it
            os.setsid()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        if is_child:
            os.setpgid(0, 0)
            subprocesses.die_with_parent(parent)()
            forget_ranks_of_torchrun()
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stdin == subprocess.DEVNULL else stdin, 0)
        if out is not None:
            fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if isinstance(out, str) else out
            os.dup2(fd, 1), os.dup2(fd, 2)
        if err is not None:
            os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),
            open(1, "w", closefd=False),
            open(2, "w", closefd=False),
        )
        if cwd is not None:
            os.chdir(cwd)
        os.environ.clear()
        # after a fork the tokenizers would wait for threads of the parent
        os.environ.update(environment, TOKENIZERS_PARALLELISM="false")
        run_program(program, search)
    finally:
        os._exit(1)


def forget_ranks_of_torchrun() -> None:
    """A job of a sweep meets its own: with the store of the sweep it would read from the connection of its parent."""
    torchrun = importlib.import_module("runner.launch.torchrun")
    torchrun._store.cache_clear()
    torchrun._messages_sent = torchrun._jobs_announced = 0


def run_program(program: list[str], search: list[str]) -> NoReturn:
    """Run `python *program` in this process and end it."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from runner.planning import planned_settings

    spawn = subprocesses.spawn

    def spawn_child(
        argv: list[str], variables: dict[str, str], out: int | None, stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen | ForkedProcess:
        environment = dict(os.environ, PYTHONUNBUFFERED="1", **variables)
        return (
            ForkedProcess(fork(argv, environment, search, None, out, is_child=True, stdin=stdin), poll_pid)
            if Path(argv[0]).name in WARM_CHILDREN
            else spawn(argv, variables, out, stdin)
        )

    def start_rank(args: tuple[str, ...], env: dict[str, str], **options: Any) -> ForkedProcess:
        assert options == {"stdout": None, "stderr": None, "start_new_session": True}, options
        return ForkedProcess(fork(list(args[1:]), env, search, None, None, new_session=True), poll_pid)

    def run_plan(command: list[str], capture_output: bool, text: bool) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            pid = fork(command[1:], dict(os.environ), search, None, str(out), str(err))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    subprocesses.spawn = spawn_child
    planned_settings.subprocess = SimpleNamespace(run=run_plan)
    subprocess_handler.Popen = start_rank  # of torchrun, whose entry point is Python: --no-python
    sys.argv, sys.path[:] = program, [str(Path(program[0]).parent), *search]
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and (Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(Path(folder) / "sitecustomize.py"))
    code: object = 0
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        traceback.print_exc()
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.path[1:], sys.argv[1:])
