"""Several ranks on this machine: `distributed=ddp distributed.nproc=2` starts, watches and restarts them.

Rank 0 writes to the terminal, the others to logs/rank<k>.log. The first failure decides the outcome, and no rank
outlives the launcher. torch's elastic agent is not used: docs/internals/design.md has what it lacks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import (
    FAILED,
    INTERRUPTED,
    OK,
    PEER_LOST,
    STOP_SIGNALS,
    USER_ERROR,
    AlreadyReported,
    Interrupted,
    Outcome,
    TrainingError,
    print_safely,
)
from common.filesystem import make_dirs, remove_quietly, temp_name, write_new_file
from common.paths import REPO_ROOT
from data.background import describe_state
from runner.config.compose import rank_environment
from runner.engine.config import Config
from runner.engine.device.cpu import threads_per_rank
from runner.engine.device.distributed import RENDEZVOUS_ENV
from runner.engine.device.heartbeat import Sign
from runner.engine.device.signals import SignalForwarder
from runner.launch import subprocesses
from runner.launch.failures import Failure
from runner.launch.supervisor import Liveness, Supervisor
from runner.launch.train_process import PEER_TIMEOUT_TEXTS
from runner.run_dir.contents import exported_loss, has_diverged, has_paused
from runner.run_dir.metadata import RunMetadata

FAILURE_GRACE = 20.0  # seconds for the other ranks to exit after a failure
HANG_GRACE = 5.0  # the same after a timeout of a collective
STACKS_GRACE = 2.0  # seconds for a rank that hangs to write its stacks
KILL_SECONDS = 10.0  # for a killed rank to be gone
FORCED_STOP_GRACE = 1.0  # the same after a second stop signal
REFUSED_RESTART = "a restart was refused, the settings or the data have changed meanwhile: see the message above"


def count_local_ranks(config: Config) -> int:
    """Return the number of ranks on this machine; distributed.nproc=auto is one per visible GPU."""
    if config.distributed.name == "single":
        return 1
    if config.distributed.nproc != "auto":
        return int(config.distributed.nproc)
    if config.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def train_on_ranks(config: Config, metadata: RunMetadata, count: int) -> float:
    """Train in `count` processes, restarted from the newest checkpoint as the supervisor decides; return the final
    loss.
    """
    metadata.allow_ranks()
    supervisor = Supervisor(config, metadata)
    with SignalForwarder() as forwarder:
        while True:
            group = RankGroup(metadata.folder, metadata.attempt, count, supervisor.watch(count))
            try:
                with _config_file(supervisor.config, metadata.folder) as config_file:
                    group.start(config_file)
                    metadata.set_rank_pids([process.pid for process in group.processes])
                    forwarder.forward_to(group.processes)
                    failed = group.watch(forwarder)
                metadata.reread()
                if failed is None:
                    return _final_loss(group, metadata)
                failure = _failure_of(group, failed, metadata, config)
            except AlreadyReported as refusal:
                if not supervisor.restarts:
                    raise
                # unlike a launch that is refused, this one has trained
                metadata.finish(Outcome.FAILED, REFUSED_RESTART)
                raise TrainingError(REFUSED_RESTART) from refusal
            finally:
                group.kill()
            supervisor.handle(failure, forwarder.is_stopping)
            metadata.mark_running()


@contextmanager
def _config_file(config: Config, folder: Path) -> Iterator[Path]:
    """Write the composed config to a temporary file for the ranks.

    After a kill the next launch removes it.
    """
    file = folder / temp_name("tmp", "config.json")
    write_new_file(file, json.dumps(dataclasses.asdict(config)).encode())
    try:
        yield file
    finally:
        remove_quietly(file)


class RankGroup:
    """The rank processes of one attempt."""

    def __init__(self, folder: Path, attempt: int, count: int, liveness: Liveness | None) -> None:
        self.folder, self.count = folder, count
        self.hanging: int | None = None  # the rank that has given no sign of life, or that a collective waited for
        self.hang = ""  # what is known of it
        # a rank has failed, and the others were asked to end: they exit with INTERRUPTED although no stop was requested
        self._is_ending = False
        self.liveness = liveness
        self.processes: list[subprocess.Popen] = []
        self.logs = [subprocesses.RankLog(folder, rank, count, attempt) for rank in range(1, count)]
        self._rendezvous_file = folder / temp_name("tmp", "rendezvous")

    def start(self, config_file: Path) -> None:
        make_dirs(self.folder / subprocesses.LOGS_DIR)
        # Signals stay blocked in a rank until it has a handler. SIGTTOU: a rank may write to a terminal whose
        # foreground group is the launcher's.
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGTTOU})
        try:
            for rank in range(self.count):
                self.processes.append(self._spawn(rank, config_file))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _spawn(self, rank: int, config_file: Path) -> subprocess.Popen:
        variables = (
            rank_environment()
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.count),
                RENDEZVOUS_ENV: f"file://{self._rendezvous_file}",
            }
            # one rank computes as a process without a launcher does
            | ({"OMP_NUM_THREADS": threads_per_rank(self.count)} if self.count > 1 else {})
            | (self.liveness.environment(rank) if self.liveness else {})
        )
        program = [str(REPO_ROOT / "runner" / "launch" / "worker.py"), str(config_file), str(os.getpid())]
        if rank == 0:
            return subprocesses.spawn(program, variables, None)
        with self.logs[rank - 1].open() as out:
            return subprocesses.spawn(program, variables, out.fileno())

    def watch(self, forwarder: SignalForwarder) -> int | None:
        """Wait until every rank has exited; return the rank that failed first, or None."""
        failed, deadline, was_killed = None, float("inf"), False
        while running := self._running():
            previous, failed = failed, self._first_failure(failed)
            if previous is None and failed is not None:
                deadline = time.monotonic() + (HANG_GRACE if any(log.stacks() for log in self.logs) else FAILURE_GRACE)
                self._is_ending = not forwarder.is_stopping()
                for process in running:
                    process.send_signal(signal.SIGTERM)
            if self.liveness and failed is None and (failed := self.liveness.hanging_rank(self.processes)) is not None:
                self.hanging, deadline = failed, time.monotonic() + HANG_GRACE
                self.hang = self._describe_hang(failed)
                self.liveness.request_stacks(running)
            if deadline == float("inf") and INTERRUPTED in self.exit_codes() and not self._have_begun(running):
                deadline = time.monotonic() + FAILURE_GRACE  # some were stopped before they had met the others
            if forwarder.is_forced():
                deadline = min(deadline, time.monotonic() + FORCED_STOP_GRACE)
            if (
                time.monotonic() > deadline
                and self.hanging is None
                and failed is not None
                and self.processes[failed].returncode == PEER_LOST
            ):
                # The ranks that waited have ended, with an error of their collective. This one has not: it is the one
                # they waited for.
                self.hanging = failed = self._last_in(running)
                self.hang, deadline = self._describe_hang(failed), time.monotonic() + STACKS_GRACE
                if self.liveness:
                    self.liveness.request_stacks([self.processes[failed]])
            elif time.monotonic() > deadline:
                was_killed = True
                self._kill_running()
            time.sleep(subprocesses.POLL_SECONDS)
        if forwarder.is_forced() and self._first_failure(None) is not None:
            # as a single process exits on a second signal; the last checkpoint is intact
            os._exit(128 + forwarder.last)
        return failed if was_killed else self._first_failure(failed)

    def _have_begun(self, running: list[subprocess.Popen]) -> bool:
        """Return whether one of the running ranks has taken part in a step or evaluation."""
        signs = self.liveness.signs() if self.liveness else []
        return any(sign.activity for sign, process in zip(signs, self.processes, strict=False) if process in running)

    def _running(self) -> list[subprocess.Popen]:
        return [process for process in self.processes if process.poll() is None]

    def _last_in(self, running: list[subprocess.Popen]) -> int:
        """Return which of the running ranks has made the least progress."""
        ranks = [rank for rank, process in enumerate(self.processes) if process in running]
        signs = self.liveness.signs() if self.liveness else []
        return min(ranks, key=lambda rank: signs[rank][:2]) if signs else ranks[0]

    def _describe_hang(self, rank: int) -> str:
        """Return what a rank that hangs did last, and what the kernel says of its process."""
        pid = self.processes[rank].pid
        sign = self.liveness.signs()[rank] if self.liveness else Sign(0, 0.0, 0, "")
        where = f" {sign.activity}, after step {sign.step}" if sign.activity else " before its first step"
        since = f" for {time.monotonic() - sign.time:.0f} s" if sign.time else ""
        return f"hangs{where} (pid {pid}, no progress{since}{describe_state(pid)})"

    def _first_failure(self, known: int | None) -> int | None:
        """Return the rank to blame.

        `known` stays unless it only lost a peer: then the rank that caused it may exit later.

        Among failures seen at the same poll, a user error or a kill is a cause, and a lost peer is a consequence.
        """
        codes = self.exit_codes()
        if known is not None and codes[known] != PEER_LOST:
            return known
        was_stopped = INTERRUPTED in codes and not self._is_ending
        # a rank that was stopped is lost to the others
        no_failures = (OK, INTERRUPTED, *([PEER_LOST] if was_stopped else []))
        failures = [(rank, code) for rank, code in enumerate(codes) if code is not None and code not in no_failures]
        return (
            min(failures, key=lambda one: (one[1] == PEER_LOST, one[1] >= 0, one[1] != USER_ERROR))[0]
            if failures
            else None
        )

    def exit_codes(self) -> list[int | None]:
        """Exit code by rank, negative for a signal; None: still running."""
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        """Kill the ranks that are left, with their data workers, and remove temporary files."""
        self._kill_running()
        remove_quietly(self._rendezvous_file)
        if self.liveness:
            self.liveness.close()

    def _kill_running(self) -> None:
        for process in self._running():
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # only while it waits in the kernel for a disk
                process.wait(KILL_SECONDS)


def _final_loss(group: RankGroup, metadata: RunMetadata) -> float:
    """Return the loss of ranks that all exited without failure."""
    if INTERRUPTED in group.exit_codes():
        # stopped before the ranks had met, or rank 0 failed because a stopped one had exited
        if metadata.fields["status"] in ("running", "failed"):
            metadata.finish(Outcome.INTERRUPTED)
        outcome = Outcome.PAUSED if has_paused(metadata.fields) else Outcome.INTERRUPTED
        raise Interrupted(metadata.fields["step"], metadata.folder, outcome)
    if metadata.fields["status"] != "completed":
        raise TrainingError("the ranks exited without recording an outcome")
    loss = exported_loss(metadata.fields)
    return 0.0 if loss is None else float(loss)


def _failure_of(group: RankGroup, first: int, metadata: RunMetadata, config: Config) -> Failure:
    """Return the failure of rank `first`, write its error to run.json, and print what the ranks wrote about it.

    Raises AlreadyReported for a user error, which a rank has printed.
    """
    codes = group.exit_codes()
    hanging = [log.rank for log in group.logs if log.stacks()]
    for rank in hanging:
        subprocesses.print_rank_lines(rank, group.logs[rank - 1].stacks())
    if codes[first] == USER_ERROR:
        # rank 0 writes to the terminal itself, unless it was asked to end before it found the error
        if codes[0] != USER_ERROR:
            for line in group.logs[first - 1].last_error_lines():
                print_safely(line, sys.stderr)
        raise AlreadyReported("the settings or the data were refused", f"rank {first}", "see the message above")
    causes = [_cause(group, rank, metadata) for rank in range(group.count)]
    error = causes[first]
    stacks = group.liveness.stacks(first) if group.liveness else []
    is_hanging = group.hanging == first
    for line in stacks:
        print_safely(line, sys.stderr)
    if is_hanging:
        timeout = f"{config.supervise.hang_timeout:g} minutes (supervise.hang_timeout)"
        error = f"no sign of life for {timeout}, the stacks are printed above: it {group.hang}"
        if PEER_LOST in codes:  # not found by the supervisor
            lost = codes.index(PEER_LOST)
            has_timed_out = any(text in causes[lost] for text in PEER_TIMEOUT_TEXTS)
            waited = (
                f"waited for {config.distributed.timeout:g} minutes (distributed.timeout)"
                if has_timed_out
                else f"says: {causes[lost]}"
            )
            error = f"{group.hang}, the stacks are printed above; rank {lost} {waited}"
    # otherwise all ranks failed alike, and none is named
    if group.count > 1 and (set(codes) != {FAILED} or len({*causes}) > 1):
        error = f"rank {first}: {error}"
        if group.hanging is None and hanging and any(text in error for text in PEER_TIMEOUT_TEXTS):
            error = f"no step for {config.distributed.timeout:g} minutes (distributed.timeout); rank {first} timed out first, the stack of each rank is printed above"
        elif first:
            subprocesses.print_rank_lines(first, group.logs[first - 1].last_error_lines())
    metadata.finish(Outcome.DIVERGED if has_diverged(metadata.fields) else Outcome.FAILED, error)
    return Failure(codes[first] or 0, first, TrainingError(error), is_hanging, stacks)


def _cause(group: RankGroup, rank: int, metadata: RunMetadata) -> str:
    lines = group.logs[rank - 1].tail() if rank else []
    return subprocesses.failure_reason(group.exit_codes()[rank] or 0, {} if rank else metadata.fields, lines)
