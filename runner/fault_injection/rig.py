"""A training command under test: launch it, disturb it, continue as a user would, and compare the run with the
undisturbed one.

A launch is a fork of this process, which has torch imported already, or the command as it is typed.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import FAILED, INTERRUPTED, OK, USER_ERROR, UserError, exiting_with_code, run_then_hard_exit
from common.filesystem import read_json_object
from common.ownership import process_stat
from common.paths import REPO_ROOT, command_line
from data.background import kill_with_parent
from runner.checkpoint.atomic_dir import TEMPORARY
from runner.fault_injection.probes import DiskHook, PhaseProbe

LAUNCH_POLL_SECONDS = 0.002
MAX_LAUNCHES = 5  # of one run directory
ORPHAN_SECONDS = 20.0  # within which ranks save and exit after their launcher was killed
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Launch:
    """One process of the training command, which leads a session of its own."""

    pid: int
    output: Path  # its stdout and stderr
    started: float = field(default_factory=time.monotonic)
    code: int | None = None  # exit code, or minus the signal that ended it
    is_hanging: bool = False

    def poll(self) -> int | None:
        if self.code is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(status[1])
        return self.code

    def wait(self, timeout: float, until: Callable[[], object] = lambda: False) -> bool:
        """Wait for the end, or for `until()`; return whether that came first.

        A launch that hangs for `timeout` seconds is killed.
        """
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if until():
                return True
            if time.monotonic() > deadline:
                self.is_hanging = True
                os.kill(self.pid, signal.SIGKILL)
                deadline += timeout
            time.sleep(LAUNCH_POLL_SECONDS)
        return False

    def send(self, number: int, to_group: bool = False) -> None:
        if self.poll() is None:
            (os.killpg if to_group else os.kill)(self.pid, number)

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""

    def errors(self) -> list[str]:
        return [line for line in self.text().splitlines() if line.startswith("error: ")]

    def left_processes(self, timeout: float) -> list[int]:
        """Return the processes of the session that are alive `timeout` seconds after its leader, and end them."""
        deadline = time.monotonic() + timeout
        while (left := session_pids(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def session_pids(leader: int) -> list[int]:
    """Return the processes of the session that `leader` has begun, without zombies and the leader itself.

    None on a system without /proc.
    """
    stats = {int(folder.name): process_stat(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    living = {pid: fields for pid, fields in stats.items() if fields and fields[0] not in "ZX"}
    return [pid for pid, fields in living.items() if pid != leader and int(fields[3]) == leader]


def import_heavy_libraries() -> None:
    """Import what a training needs, once, before the first fork, and give all launches one number of threads.

    Nothing is computed: threads would not survive a fork.
    """
    import torch._dynamo  # otherwise the first AdamW imports it, for a second, in every fork

    import runner.engine.build
    import runner.engine.loop  # noqa: F401  imported here so that each fork finds it loaded; no name of it is used
    from runner.engine.device.cpu import fix_threads

    torch.set_num_threads(fix_threads())


def launch_training(
    argv: list[str], output: Path, prepare: Callable[[], object] = lambda: None, is_cold: bool = False
) -> Launch:
    """Run `python runner/train.py *argv` in a fork, after `prepare()` there; `is_cold`: as it is typed."""
    import lm_runner

    program = [str(REPO_ROOT / "runner" / "train.py"), *argv]

    def command() -> int:
        if is_cold:
            os.execv(sys.executable, [sys.executable, *program])
        prepare()
        sys.argv = program
        lm_runner.run_command("train")
        return 0

    return launch_fork(command, output)


def launch_fork(main: Callable[[], int], output: Path) -> Launch:
    """Fork this process. The fork calls `main` and exits with its code; its output is appended to `output`. It ends
    with this process.
    """
    parent = os.getpid()
    if child := os.fork():
        return Launch(child, output)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # after a fork the tokenizers would wait for threads of the parent

    def fork_main() -> int:
        os.setsid()
        kill_with_parent(parent)
        stdin, out = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(stdin, 0), os.dup2(out, 1), os.dup2(out, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        try:
            with exiting_with_code():
                return main()
        finally:  # as at the end of any program: end pools of threads, wait for the checkpoint writer
            vars(threading)["_shutdown"]()

    run_then_hard_exit(fork_main)


@dataclass
class FaultResult:
    """What came of one fault. `broken` has a text for each promise that was not kept."""

    kind: str
    number: int
    fault: str = "none"  # what was injected, as text
    injected: bool = False
    acknowledged: float | None = None  # seconds from a signal to its acknowledgement
    codes: list[int | None] = field(default_factory=list)  # exit code of each launch
    started_again: int = 0  # launches that typed the same command again, because there was nothing to resume
    seconds: float = 0.0  # all launches together
    hand: list[str] = field(default_factory=list)  # why a user had to do more than to type resume= or the same command
    bits: list[str] = field(default_factory=list)  # what differs from the undisturbed run
    tracebacks: list[str] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)  # exit codes that are not true, signals that were not acknowledged
    leftovers: list[str] = field(default_factory=list)  # files and processes that are left over

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @property
    def broken(self) -> list[str]:
        return [*self.hand, *self.bits, *self.tracebacks, *self.exits, *self.leftovers]


@dataclass
class UninterruptedRun:
    """The undisturbed run, and what was measured on it."""

    run_dir: Path
    seconds: float
    probe: PhaseProbe
    file_calls: int
    step: int

    def seconds_of(self, phase: str) -> float:
        """Return how long the phase takes each time."""
        times, seconds = self.probe.read(phase)
        return seconds / max(times, 1)


@dataclass
class Rig:
    """The command under test in one folder."""

    overrides: list[str]
    folder: Path
    timeout: float

    def argv(self, run_dir: Path) -> list[str]:
        return [*self.overrides, f"data.cache={self.folder / 'cache'}", f"hydra.run.dir={run_dir}"]

    def clear_cache(self) -> None:
        """Remove the token stores, so that the next launch tokenizes.

        The folder stays: a resume uses another one than a saved `data.cache` that is missing.
        """
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        (self.folder / "cache").mkdir(parents=True)


class Trial:
    """One run directory under test. `launch` until `finish` has made it complete, or given up."""

    def __init__(self, rig: Rig, kind: str, number: int, seed: int, draw: int = 0, is_cold: bool = False) -> None:
        """`draw`: how often the fault was drawn before, but came after the end of the run; `is_cold`: a real command is
        disturbed instead of a fork.
        """
        self.rig, self.result, self.draw, self.is_cold = rig, FaultResult(kind, number), draw, is_cold
        self.rng = random.Random(f"{seed} {kind} {number} {draw}")
        self.folder = rig.folder / self.result.name
        self.run_dir, self.probe = self.folder / "run", PhaseProbe()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rng.random() < 0.5:
            rig.clear_cache()

    def launch(
        self, argv: list[str] | None = None, prepare: Callable[[], object] = lambda: None, is_cold: bool = False
    ) -> Launch:
        """Start the command, or what continues it: `resume=`, or the same command if no run has begun."""
        if argv is None:
            has_begun = (self.run_dir / "run.json").exists()
            argv = [f"resume={self.run_dir}"] if has_begun else self.rig.argv(self.run_dir)
        self.result.started_again += bool(self.result.codes) and not argv[-1].startswith("resume=")
        output = self.folder / f"launch{len(self.result.codes) + 1}.txt"
        output.write_text("")

        def prepare_fork() -> None:
            self.probe.install()
            prepare()

        self._launch = launch_training(argv, output, prepare_fork, is_cold)
        return self._launch

    def wait(self, until: Callable[[], object] = lambda: False) -> None:
        """Wait for the end of the launch, or for `until()`."""
        self._launch.wait(self.rig.timeout, until)

    def end(self, disturbed: bool = False) -> int | None:
        """Wait for the launch, and check what it has left."""
        self.wait()
        launch, result, name = self._launch, self.result, f"launch {len(self.result.codes) + 1}"
        result.codes.append(launch.code)
        result.seconds += time.monotonic() - launch.started
        if launch.is_hanging:
            result.exits.append(f"{name}: did not end within {self.rig.timeout:g} s")
        if left := launch.left_processes(ORPHAN_SECONDS):
            result.leftovers.append(f"{name}: {len(left)} processes are left")
        if TRACEBACK in launch.text():
            result.tracebacks.append(f"{name}: a traceback in {launch.output}")
        if reason := self._wrong_exit(launch, disturbed):
            result.exits.append(f"{name}: {reason}")
        return launch.code

    def launch_to_end(self, argv: list[str] | None = None) -> int | None:
        self.launch(argv)
        return self.end()

    def _wrong_exit(self, launch: Launch, disturbed: bool) -> str | None:
        """Return why the exit code is not true.

        `disturbed`: a signal or SIGKILL was sent, which may also end it at once.
        """
        fields = read_json_object(self.run_dir / "run.json")
        code, status = launch.code, fields.get("status")
        expected = {OK: "completed", INTERRUPTED: "interrupted"}
        if code in expected and status != expected[code]:
            return f"exit code {code}, and run.json has status {status}"
        if code == OK and not (self.run_dir / "model").is_dir():
            return "exit code 0, and there is no model/"
        if code in (FAILED, USER_ERROR) and "error: " not in launch.text():
            return f"exit code {code} without an error message"
        is_known = code in (*expected, FAILED, USER_ERROR)
        return None if is_known or disturbed else f"exit code {code}"

    def finish(self) -> None:
        """Continue as a user would until the run is complete."""
        while self.result.codes[-1] != OK and len(self.result.codes) < MAX_LAUNCHES:
            if self.launch_to_end() == USER_ERROR:
                refused = (self._launch.errors() or ["no message"])[0]
                if self.launch_to_end(self.rig.argv(self.run_dir)) == USER_ERROR:
                    self.result.hand.append(f"resume= refused: {refused}; the same command is refused, too")
                    return
        if self.result.codes[-1] != OK:
            self.result.hand.append(f"not complete after {MAX_LAUNCHES} launches, exit codes {self.result.codes}")

    def compare(self, reference: UninterruptedRun) -> None:
        """Record how the run differs from the undisturbed one, and which temporary files it has left."""
        from runner.engine.verify_resume import diff_run_dirs

        if self.result.codes[-1] != OK:
            return
        self.result.bits += diff_run_dirs(reference.run_dir, self.run_dir)
        weights = [
            run_dir / "model" / name
            for run_dir in (reference.run_dir, self.run_dir)
            for name in ("model.safetensors", "adapter_model.safetensors")
        ]
        if len({path.read_bytes() for path in weights if path.is_file()}) != 1:
            self.result.bits.append("weights in model/")
        if self._temporary_files():  # of a disk that refused to remove them: the next launch does
            self.launch_to_end([f"resume={self.run_dir}"])
        self.result.leftovers += [f"{name} is left" for name in self._temporary_files()]

    def _temporary_files(self) -> list[str]:
        return [path.name for path in self.run_dir.rglob(".*") if path.name.startswith(TEMPORARY)]


def run_reference(rig: Rig, name: str = "reference") -> UninterruptedRun:
    """Run the command undisturbed. Raises UserError if it does not complete."""
    trial = Trial(rig, name, 1, seed=0)
    rig.clear_cache()
    hook = DiskHook(trial.run_dir)
    launch = trial.launch(prepare=hook.install)
    if trial.end() != OK:
        raise UserError(
            f"the undisturbed run ended with exit code {launch.code}:\n{launch.text()[-2000:]}",
            shlex.join([*command_line("train"), *rig.overrides]),
            "correct the command; nothing was disturbed yet",
        )
    step = int(read_json_object(trial.run_dir / "run.json").get("step", 0))
    return UninterruptedRun(trial.run_dir, trial.result.seconds, trial.probe, hook.calls, step)
