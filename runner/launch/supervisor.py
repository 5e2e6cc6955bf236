"""Whether the ranks of a training are alive, and what happens between a failure and a restart.

Each rank counts its micro-batches in a file. A rank that stops counting is made to write its stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from common.errors import Interrupted, Outcome, print_note, print_safely
from common.guarded_files import last_lines
from common.ownership import process_stat
from runner.checkpoint.atomic_dir import step_names
from runner.checkpoint.format import CHECKPOINTS_DIR, step_of
from runner.diagnostics.symptoms import troubleshooting
from runner.engine.config import Config
from runner.engine.device.heartbeat import HEARTBEAT_ENV, RECORD, Sign, read_sign
from runner.launch.failures import (
    Failure,
    FailureKind,
    RestartPolicy,
    append_incident,
    classify_failure,
    count_oom_kills,
)
from runner.launch.subprocesses import POLL_SECONDS
from runner.run_dir.contents import timestamp
from runner.run_dir.metadata import RunMetadata

STACKS_ENV = "RUNNER_STACKS"  # file for the stacks that faulthandler writes at a crash
CHECK_SECONDS = 10.0
MAX_STACKS_BYTES = 1 << 16
MAX_STACKS_LINES = 60
TICKS = os.sysconf("SC_CLK_TCK")
BUSY_SHARE = 0.01  # of one core; a process that waits for ever uses less


class Liveness:
    """The files of the ranks of one attempt, in a private folder of the system: the run directory may be on a full or
    slow disk.
    """

    def __init__(self, count: int, hang_seconds: float) -> None:
        """`hang_seconds`: without a sign of life; 0: hangs are not looked for."""
        self._folder = tempfile.TemporaryDirectory(prefix="lm-runner-supervise-")
        self._heartbeats = [Path(self._folder.name) / f"heartbeat{rank}" for rank in range(count)]
        self._stacks = [Path(self._folder.name) / f"stacks{rank}" for rank in range(count)]
        self._seconds = hang_seconds
        now = time.monotonic()
        self._counts, self._alive_at, self._checked_at = [0] * count, [now] * count, now
        self._cpu_seconds = [0.0] * count
        for file in self._heartbeats:
            file.write_bytes(bytes(RECORD.size))

    def environment(self, rank: int) -> dict[str, str]:
        return {HEARTBEAT_ENV: str(self._heartbeats[rank]), STACKS_ENV: str(self._stacks[rank])}

    def hanging_rank(self, processes: Sequence[subprocess.Popen]) -> int | None:
        """Return the rank that has given no sign of life for too long, the one with the smallest count if several have
        not; None: no rank.

        Before its first step is done (imports, tokenizing, compilation) a process that computes is alive, too.
        """
        now = time.monotonic()
        if not self._seconds or now - self._checked_at < min(CHECK_SECONDS, self._seconds / 4):
            return None
        elapsed, self._checked_at = now - self._checked_at, now
        # this process was stopped meanwhile, and perhaps the ranks with it
        if elapsed > max(CHECK_SECONDS, self._seconds) / 2 + CHECK_SECONDS:
            self._alive_at = [now] * len(processes)
        for rank, process in enumerate(processes):
            sign = read_sign(self._heartbeats[rank])
            used = _cpu_seconds(process.pid) if sign.step == 0 else 0.0
            is_starting = used - self._cpu_seconds[rank] > BUSY_SHARE * elapsed
            if sign.beats != self._counts[rank] or is_starting or process.returncode is not None:
                self._alive_at[rank] = now
            self._counts[rank], self._cpu_seconds[rank] = sign.beats, used
        hanging = [rank for rank, alive_at in enumerate(self._alive_at) if now - alive_at > self._seconds]
        return min(hanging, key=lambda rank: self._counts[rank]) if hanging else None

    def signs(self) -> list[Sign]:
        """Return what each rank has written last."""
        return [read_sign(file) for file in self._heartbeats]

    def request_stacks(self, processes: Sequence[subprocess.Popen]) -> None:
        """Make the ranks write the stacks of all their threads, and end."""
        for process in processes:
            if process.poll() is None:
                with suppress(OSError):
                    process.send_signal(signal.SIGABRT)
                    process.send_signal(signal.SIGCONT)  # it may be stopped

    def stacks(self, rank: int) -> list[str]:
        """Return the stacks that `rank` has written, at a crash or on request."""
        return last_lines(self._stacks[rank], MAX_STACKS_BYTES)[:MAX_STACKS_LINES]

    def close(self) -> None:
        self._folder.cleanup()


def write_stacks_at_a_crash() -> None:
    """Have this process write the stacks of its threads to the supervisor's file when a signal such as SIGSEGV or
    SIGABRT ends it.
    """
    if path := os.environ.get(STACKS_ENV):
        faulthandler.enable(open(path, "w"))  # open until the process ends


def _cpu_seconds(group: int) -> float:
    """Return the processor time that the living processes of a process group have used; 0 where there is no /proc."""
    stats = [process_stat(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return sum(int(fields[11]) + int(fields[12]) for fields in stats if fields and int(fields[2]) == group) / TICKS


LOG_LINES, LOG_BYTES = 12, 1 << 14  # of train.log, in a record


class Supervisor:
    """Decides on restarts and records incidents.

    Without train.supervise it restarts ranks at once, up to distributed.max_restarts times in all.
    """

    def __init__(self, config: Config, metadata: RunMetadata) -> None:
        self.config = config  # of the next attempt
        self.restarts = 0  # so far
        self._metadata, self._is_on, self._oom_kills = metadata, config.train.supervise, count_oom_kills()
        options = config.supervise
        self._policy = (
            RestartPolicy(options.max_restarts, options.delay)
            if self._is_on
            else RestartPolicy(config.distributed.max_restarts, counts_all=True)
        )

    def watch(self, count: int) -> Liveness | None:
        """Return what watches the `count` ranks of one attempt.

        Without train.supervise it only knows which of several ranks a collective waits for.
        """
        try:
            return Liveness(count, self.config.supervise.hang_timeout * 60 if self._is_on else 0)
        except OSError as error:
            print_note(
                f"warning: the ranks are not watched, a hang is not noticed: {error.strerror or error}; set TMPDIR to a folder on a disk with free space"
            )
            return None

    def kind_of(self, failure: Failure) -> FailureKind:
        """Classify a failure, once; run.json has been read again."""
        before, self._oom_kills = self._oom_kills, count_oom_kills()
        outcome, kills = self._metadata.fields.get("outcome"), self._oom_kills - before
        return classify_failure(failure.code, str(failure.error), outcome, failure.is_hanging, kills)

    def handle(self, failure: Failure, is_stopping: Callable[[], bool]) -> None:
        """Return when the ranks are to be started again, with `config`.

        Raises the error of `failure` if not, Interrupted if `is_stopping()` meanwhile.
        """
        kind = self.kind_of(failure)
        decision = self._policy.decide(kind, self._saved_step())
        restarts = decision.restarts and not is_stopping()
        action = (
            "no restart: a stop was requested"
            if is_stopping()
            else decision.action + (self._adapt(kind) if restarts else "")
        )
        if self._is_on:
            self._record(failure, kind, action)
        if self._is_on or restarts:
            print_safely(f"{failure.error}; {action}", sys.stderr)
        if advice := self._advice(kind):
            print_safely(advice, sys.stderr)
        if self._is_on and kind == FailureKind.STOPPED:
            self._interrupt()
        if not restarts:
            raise failure.error
        self._wait(decision.delay, is_stopping)
        self.restarts += 1

    def _adapt(self, kind: FailureKind) -> str:
        """Halve the micro-batch after a lack of memory, if asked for; return what changes.

        The rows of a step stay, their sums are rounded differently.
        """
        train = self.config.train
        if kind != FailureKind.OUT_OF_MEMORY or not (self._is_on and self.config.supervise.halve_batch):
            return ""
        from runner.planning.alternatives import smaller_micro_batch

        if (smaller := smaller_micro_batch(train.batch_size, train.accumulation_steps)) is None:
            return ""
        changed = replace(train, batch_size=smaller.size, accumulation_steps=smaller.accumulation)
        self.config = replace(self.config, train=changed)
        return f", {smaller.overrides}"

    def _advice(self, kind: FailureKind) -> str:
        """Return what to type where the process could not say it itself: it was killed."""
        train = self.config.train
        if kind == FailureKind.HANG:
            return f"hang: the stacks show what the process waits for; {troubleshooting('hang')}"
        if kind != FailureKind.OUT_OF_MEMORY or (self._is_on and self.config.supervise.halve_batch):
            return ""
        from runner.planning.alternatives import half_micro_batch, smaller_micro_batch

        same_rows, half = (
            find(train.batch_size, train.accumulation_steps) for find in (smaller_micro_batch, half_micro_batch)
        )
        fix = same_rows.overrides if same_rows is not None else "train.activation_checkpointing=full"
        fix += f" (or {half.overrides}: {half.changes})" if half is not None else ""
        return f"out of memory: {fix} needs less, python runner/plan.py with the same overrides says how much; {troubleshooting('out-of-memory')}"

    def _record(self, failure: Failure, kind: FailureKind, action: str) -> None:
        folder, fields = self._metadata.folder, self._metadata.fields
        lines = last_lines(folder / "train.log", LOG_BYTES)[-LOG_LINES:]
        incident = {
            "time": timestamp(),
            "attempt": fields["attempt"],
            "step": self._saved_step(),
            "rank": failure.rank,
            "kind": kind,
            "exit_code": failure.code if failure.code >= 0 else None,
            "signal": signal.Signals(-failure.code).name if failure.code < 0 else None,
            "error": str(failure.error),
            "action": action,
            "last_lines": lines,
            "stacks": failure.stacks,
        }
        append_incident(folder, incident)

    def _wait(self, seconds: float, is_stopping: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if is_stopping():
                self._interrupt()
            time.sleep(POLL_SECONDS)

    def _interrupt(self) -> None:
        """End as after a stop request: the newest checkpoint is what can be resumed."""
        self._metadata.finish(Outcome.INTERRUPTED)
        raise Interrupted(self._saved_step(), self._metadata.folder)

    def _saved_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none. run.json learns of a checkpoint later than the
        disk.
        """
        names = step_names(self._metadata.folder / CHECKPOINTS_DIR)
        return step_of(names[0]) if names else 0
