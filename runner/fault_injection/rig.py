"""One run directory under test: launch, disturb, continue as a user would, and compare with the undisturbed run."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import exit_codes
from common.filesystem import read_json_object
from runner.fault_injection.launches import Launch, launch_command, launch_fork
from runner.fault_injection.phases import PhaseProbe

MAX_LAUNCHES = 5  # of one run directory
ORPHAN_SECONDS = 20.0  # within which ranks save and exit after their launcher was killed
TRACEBACK = "Traceback (most recent call last)"


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

    def next_argv(self, run_dir: Path) -> list[str]:
        """Return what a user types after a fault: `resume=`, or the same command if no run has begun."""
        return [f"resume={run_dir}"] if (run_dir / "run.json").exists() else self.argv(run_dir)

    def clear_cache(self) -> None:
        """Remove the token stores, so that the next launch tokenizes.

        The folder stays: a resume uses another one than a saved `data.cache` that is missing.
        """
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        (self.folder / "cache").mkdir(parents=True)


class Trial:
    """One run directory under test. `launch` until `finish` has made it complete, or given up."""

    def __init__(self, rig: Rig, kind: str, number: int, seed: int, draw: int = 0) -> None:
        """`draw`: how often the fault was drawn before, but came after the end of the run."""
        self.rig, self.result, self.draw = rig, FaultResult(kind, number), draw
        self.rng = random.Random(f"{seed} {kind} {number} {draw}")
        self.folder = rig.folder / self.result.name
        self.run_dir = self.folder / "run"
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rng.random() < 0.5:
            rig.clear_cache()

    def launch(
        self, argv: list[str] | None = None, cold: bool = False, prepare: Callable[[], object] = lambda: None
    ) -> Launch:
        """Start the command, or what continues it."""
        argv = self.rig.next_argv(self.run_dir) if argv is None else argv
        self.result.started_again += bool(self.result.codes) and not argv[-1].startswith("resume=")
        output = self.folder / f"launch{len(self.result.codes) + 1}.txt"
        output.write_text("")
        return launch_command(argv, output) if cold else launch_fork(argv, output, prepare)

    def end(self, launch: Launch, disturbed: bool = False) -> int | None:
        """Wait for a launch, and check what it has left."""
        launch.wait(self.rig.timeout)
        result, name = self.result, f"launch {len(self.result.codes) + 1}"
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

    def _wrong_exit(self, launch: Launch, disturbed: bool) -> str | None:
        """Return why the exit code is not true.

        `disturbed`: a signal or SIGKILL was sent, which may also end it at once.
        """
        fields = read_json_object(self.run_dir / "run.json")
        code, status = launch.code, fields.get("status")
        if code == exit_codes.OK and status != "completed":
            return f"exit code 0, and run.json has status {status}"
        if code == exit_codes.OK and not (self.run_dir / "model").is_dir():
            return "exit code 0, and there is no model/"
        if code == exit_codes.INTERRUPTED and status != "interrupted":
            return f"exit code {code}, and run.json has status {status}"
        if (
            code not in (exit_codes.OK, exit_codes.FAILED, exit_codes.USER_ERROR, exit_codes.INTERRUPTED)
            and not disturbed
        ):
            return f"exit code {code}"
        if code in (exit_codes.FAILED, exit_codes.USER_ERROR) and "error: " not in launch.text():
            return f"exit code {code} without an error message"
        return None

    def finish(self) -> None:
        """Continue as a user would until the run is complete."""
        while self.result.codes[-1] != exit_codes.OK and len(self.result.codes) < MAX_LAUNCHES:
            if self.end(self.launch()) == exit_codes.USER_ERROR:
                refused = f"refused: {self._last_error()}"
                if self.end(self.launch(self.rig.argv(self.run_dir))) == exit_codes.USER_ERROR:
                    self.result.hand.append(f"resume= {refused}; the same command is refused, too")
                    return
        if self.result.codes[-1] != exit_codes.OK:
            self.result.hand.append(f"not complete after {MAX_LAUNCHES} launches, exit codes {self.result.codes}")

    def compare(self, reference: UninterruptedRun) -> None:
        """Record how the run differs from the undisturbed one, and which temporary files it has left."""
        from runner.engine.verify_resume import diff_run_dirs

        if self.result.codes[-1] != exit_codes.OK:
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
            self.end(self.launch([f"resume={self.run_dir}"]))
        self.result.leftovers += [f"{name} is left" for name in self._temporary_files()]

    def _temporary_files(self) -> list[str]:
        return [path.name for path in self.run_dir.rglob(".*") if path.name.startswith((".tmp-", ".del-"))]

    def _last_error(self) -> str:
        lines = (self.folder / f"launch{len(self.result.codes)}.txt").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith("error: ")), "no message")

    def discard(self) -> None:
        """Remove the run of a fault that broke no promise."""
        shutil.rmtree(self.folder, ignore_errors=True)


def run_reference(rig: Rig, name: str = "reference") -> UninterruptedRun:
    """Run the command undisturbed. Raises RuntimeError if it does not complete."""
    from runner.fault_injection.disk_faults import DiskHook

    run_dir, probe = rig.folder / name / "run", PhaseProbe()
    run_dir.parent.mkdir(parents=True)
    hook = DiskHook(run_dir)

    def prepare() -> None:
        probe.install()
        hook.install()

    rig.clear_cache()
    launch = launch_fork(rig.argv(run_dir), run_dir.parent / "launch1.txt", prepare)
    launch.wait(rig.timeout)
    seconds = time.monotonic() - launch.started
    if launch.code != exit_codes.OK:
        raise RuntimeError(f"the undisturbed run ended with exit code {launch.code}:\n{launch.text()[-2000:]}")
    return UninterruptedRun(
        run_dir, seconds, probe, hook.calls, int(read_json_object(run_dir / "run.json").get("step", 0))
    )


def as_record(result: FaultResult) -> dict[str, object]:
    return {"name": result.name, **dataclasses.asdict(result), "broken": result.broken}
