"""Training processes as forks of a process that has done their imports: `python runner/launch/fork_server.py`.

The imports are half of a job of a hundred steps. The process has started no thread and computed nothing, so a fork is
what a cold start is after its imports. It is the parent of its forks: they receive SIGTERM when it dies, and it dies
with the process that has started it.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started by path: replace runner/launch/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")

import gc
import importlib
import json
import runpy
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from common.paths import REPO_ROOT
from common.registry import PLUGINS_ENV
from runner.config.compose import HYDRA_CONFIG_ENV
from runner.launch import subprocesses, torchrun

TRAIN_SCRIPT = str(REPO_ROOT / "runner" / "train.py")
# of a job before its first step
IMPORTS = """
    runner.train runner.cli.hydra_app runner.launch.resume runner.engine.build runner.engine.loop
    runner.inference.evaluate runner.reporting.run_page tokenizers models.decoder
""".split()
LATE_VARIABLES = (HYDRA_CONFIG_ENV, "CUDA_VISIBLE_DEVICES")  # read after the imports, so a fork may have its own
MESSAGE_BYTES = 1 << 17


class ServerLostError(Exception):
    """The server has ended; its forks have received SIGTERM."""


class ForkServer:
    """Starts training processes as forks of a server, which is started with the first one."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._variables: dict[str, str] = {}  # that the server was started with
        self._is_lost = False

    def start(self, program: list[str], variables: dict[str, str], out: int) -> ForkedProcess | None:
        """Run `python *program` as `subprocesses.spawn` does; return None where only a cold start computes the same."""
        shared = {name: value for name, value in variables.items() if name not in LATE_VARIABLES}
        late = {name: variables[name] for name in LATE_VARIABLES if name in variables}
        fits = len(json.dumps([program, late])) < MESSAGE_BYTES // 2
        if self._is_lost or not (fits and _may_fork(program, variables)):
            return None
        if self._channel is None:
            self._channel, server_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with server_end:
                self._process = subprocesses.spawn([__file__], shared, out, server_end.fileno())
            self._variables = shared
        if shared != self._variables:
            return None
        with suppress(ServerLostError):
            if (pid := self.ask({"program": program, "environment": late}, out)) is not None:
                return ForkedProcess(self, pid)
        return None

    def ask(self, request: dict[str, Any], *descriptors: int) -> int | None:
        """Return the answer of the server. Raises ServerLostError."""
        assert self._channel is not None
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            answer = self._channel.recv(MESSAGE_BYTES)
        except OSError:
            answer = b""
        if not answer:
            self._is_lost = True
            raise ServerLostError
        number: int | None = json.loads(answer)
        return number

    def close(self) -> None:
        """End the server; its forks have ended."""
        if self._channel is not None:
            with suppress(OSError):  # a page that is being written in a fork of this process has a copy, too
                self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self._process.wait()


class ForkedProcess:
    """A fork of the server, with the methods of `subprocess.Popen` that a backend uses."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Return the exit code, None while it runs. Raises ServerLostError."""
        return self._server.ask({"poll": self.pid})

    def terminate(self) -> None:
        """Ask a process that `poll` has not seen end to save and exit."""
        with suppress(ServerLostError):  # then it has received SIGTERM
            self._server.ask({"terminate": self.pid})


def _may_fork(program: list[str], environment: Mapping[str, str]) -> bool:
    """Return whether a fork computes what a cold start does: nothing of the user's runs before the imports."""
    job = json.loads(environment.get(HYDRA_CONFIG_ENV, "{}"))
    return (
        sys.platform == "linux"
        and program[0] == TRAIN_SCRIPT
        and not torchrun.under_torchrun()
        and PLUGINS_ENV not in environment
        and not job.get("job", {}).get("env_set")
        and not job.get("callbacks")
    )


def serve_forks(channel: socket.socket) -> list[str] | None:
    """Answer requests until the connection is closed; in a fork return the program to run."""
    can_fork = _import_all()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 1)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        answer = None
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif "terminate" in request:
            os.kill(request["terminate"], signal.SIGTERM)
        elif can_fork and not (answer := _fork(request["environment"], descriptors[0])):
            channel.close()
            program: list[str] = request["program"]
            return program
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(answer).encode())


def _import_all() -> bool:
    """Do the imports of a job in its order; return whether this process may be forked."""
    from runner.engine.device.spinning import set_wait_policy

    set_wait_policy()
    for module in IMPORTS:
        importlib.import_module(module)
    from runner.checkpoint.compatibility import code_fingerprint

    code_fingerprint()  # a job records the code that it runs, which is read here
    gc.collect()
    gc.freeze()
    if not (pid := os.fork()):  # OpenBLAS ends its threads before a fork
        os._exit(0)
    os.waitpid(pid, 0)
    import torch

    return len(os.listdir("/proc/self/task")) == 1 and not torch.cuda.is_initialized()


def _fork(environment: dict[str, str], out: int) -> int:
    """Return the pid of a fork; 0 in the fork, whose output goes to `out`."""
    server = os.getpid()
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    subprocesses.die_with_parent(server)()
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    os.environ.update(environment)
    return 0


def run_fork_server() -> None:
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    if program := serve_forks(channel):
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    run_fork_server()
