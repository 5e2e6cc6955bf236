"""One run in many processes of this machine: `distributed=ddp distributed.nproc=2` starts them, watches them, and says what became of them.

The first rank speaks where we do, every other into logs/rank<k>.log. The first rank that fails decides; no rank outlives it, or us.
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
from contextlib import contextmanager
from pathlib import Path

from common.errors import AlreadyReported, Interrupted, TrainingError
from common.exit_codes import FAILED, INTERRUPTED, OK, PEER_LOST, USER_ERROR
from common.filesystem import make_dirs, remove_quietly, temp_name, write_new_file
from common.paths import REPO_ROOT
from runner.engine.config import Config
from runner.engine.device.distributed import RENDEZVOUS_ENV
from runner.launch import rank_logs, subprocesses
from runner.launch.signal_forwarder import SignalForwarder
from runner.launch.signals import STOP_SIGNALS
from runner.run_dir import metadata
from runner.run_dir.metadata import RunMetadata

FAILURE_GRACE = 20.0  # seconds a rank has to leave, once another has failed ...
HANG_GRACE = 5.0  # ... or once the ranks have waited for each other in vain
FORCED_STOP_GRACE = 1.0  # whoever asks twice wants them gone


def count_local_ranks(config: Config) -> int:
    """How many ranks of this machine train; `auto` is one for each GPU that may be used."""
    if config.distributed.name == "single":
        return 1
    if config.distributed.nproc != "auto":
        return int(config.distributed.nproc)
    if config.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def train_on_ranks(config: Config, record: RunMetadata, count: int) -> float:
    """As `carry`, in `count` processes; they are started again from the newest checkpoint as often as distributed.max_restarts allows."""
    record.share()
    with SignalForwarder() as asked, _config_file(config, record.folder) as file:
        for restart in range(config.distributed.max_restarts + 1):
            group = RankGroup(record.folder, record.attempt, count)
            try:
                group.start(file)
                record.name_ranks([process.pid for process in group.processes])
                asked.to(group.processes)
                failed = group.watch(asked)
            finally:
                group.end()
            record.reread()
            if failed is None:
                return _outcome(group, record)
            error = _failure_of(group, failed, record, config.distributed.timeout)
            if restart == config.distributed.max_restarts or asked() or metadata.has_diverged(record.fields):
                raise error
            print(f"{error}; restart {restart + 1} of {config.distributed.max_restarts} from the last checkpoint", file=sys.stderr, flush=True)
            record.running()
    raise AssertionError("the last restart returns or raises")


@contextmanager
def _config_file(config: Config, folder: Path) -> Iterator[Path]:
    """The composed config as a file that the ranks read. Should we be killed, it is swept up with other litter."""
    file = folder / temp_name("tmp", "config.json")
    write_new_file(file, json.dumps(dataclasses.asdict(config)).encode())
    try:
        yield file
    finally:
        remove_quietly(file)


class RankGroup:
    """The ranks of one attempt."""

    def __init__(self, folder: Path, attempt: int, count: int) -> None:
        self.folder, self.count = folder, count
        self.processes: list[subprocess.Popen] = []
        self.logs = [rank_logs.RankLog(folder, rank, count, attempt) for rank in range(1, count)]
        self._meeting = folder / temp_name("tmp", "meeting")

    def start(self, file: Path) -> None:
        make_dirs(self.folder / rank_logs.LOGS_DIR)
        # A signal between its start and its first line would kill a rank: it waits until it is heard. A rank may also write to a
        # terminal whose foreground is ours.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGTTOU})
        try:
            for rank in range(self.count):
                self.processes.append(self._started(rank, file))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _started(self, rank: int, file: Path) -> subprocess.Popen:
        environment = subprocesses.child_env() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            RENDEZVOUS_ENV: f"file://{self._meeting}",
            "OMP_NUM_THREADS": threads_per_rank(self.count),
        }
        program = [str(REPO_ROOT / "runner" / "launch" / "worker.py"), str(file), str(os.getpid())]
        if rank == 0:
            return subprocesses.spawn(program, environment, None)
        with self.logs[rank - 1].open() as out:
            return subprocesses.spawn(program, environment | {"PYTHONUNBUFFERED": "1"}, out.fileno())

    def watch(self, asked: SignalForwarder) -> int | None:
        """Until the last has ended; returns the rank that failed first, if one has."""
        failed, last_call, ended_by_us = None, float("inf"), False
        while living := [process for process in self.processes if process.poll() is None]:
            before, failed = failed, self._blamed(failed)
            if before is None and failed is not None:
                last_call = time.monotonic() + (HANG_GRACE if any(log.stacks() for log in self.logs) else FAILURE_GRACE)
                for process in living:
                    process.send_signal(signal.SIGTERM)
            if asked.twice():
                last_call = min(last_call, time.monotonic() + FORCED_STOP_GRACE)
            if time.monotonic() > last_call:
                ended_by_us = True
                self.end()
            time.sleep(subprocesses.POLL_SECONDS)
        if asked.twice() and self._failed() is not None:
            self.end()
            os._exit(128 + asked.last)  # as one process would: nothing was saved for it, the checkpoint before stands
        return failed if ended_by_us else self._blamed(failed)

    def _blamed(self, so_far: int | None) -> int | None:
        """A rank that is alone may end before the one that left it so."""
        return self._failed() if so_far is None or self.codes()[so_far] == PEER_LOST else so_far

    def _failed(self) -> int | None:
        """Of several that are found together, one that was killed or refuses has not been dragged along by the others; one that is alone has."""
        bad = [(rank, code) for rank, code in enumerate(self.codes()) if code not in (None, OK, INTERRUPTED)]
        return min(bad, key=lambda one: (one[1] == PEER_LOST, one[1] >= 0, one[1] != USER_ERROR))[0] if bad else None

    def codes(self) -> list[int | None]:
        return [process.returncode for process in self.processes]

    def end(self) -> None:
        """None is left, nor a data worker of theirs."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        remove_quietly(self._meeting)


def threads_per_rank(count: int) -> str:
    """Each rank its part of the cores. Whoever has set the variable is obeyed; a sweep sets it for its jobs, and says so."""
    given, share = os.environ.get("OMP_NUM_THREADS"), os.environ.get(subprocesses.THREADS_ENV)
    if given and given != share:
        return given
    return str(max(1, int(share or len(os.sched_getaffinity(0))) // count))


def _outcome(group: RankGroup, record: RunMetadata) -> float:
    """Of ranks that have all ended as they should."""
    if INTERRUPTED in group.codes():
        raise Interrupted(record.fields["step"], record.folder)
    if record.fields["status"] != "completed":
        raise TrainingError("the ranks have left without a word")
    loss = metadata.final_loss(record.fields)
    return 0.0 if loss is None else float(loss)


def _failure_of(group: RankGroup, first: int, record: RunMetadata, timeout: float) -> TrainingError:
    """Why the run failed, as it will stand in run.json; the terminal gets what the ranks said of it. A refusal is raised at once."""
    codes = group.codes()
    hung = [log.rank for log in group.logs if log.stacks()]
    for rank in hung:
        rank_logs.print_rank_lines(rank, group.logs[rank - 1].stacks())
    if codes[first] == USER_ERROR:
        if codes[0] != USER_ERROR:
            rank_logs.print_rank_lines(first, group.logs[first - 1].ending())
        raise AlreadyReported("a rank has refused", f"rank {first}", "it has said why")
    causes = [_cause(group, rank, record) for rank in range(group.count)]
    error = causes[first]
    if set(codes) != {FAILED} or len({*causes}) > 1:  # otherwise all of them came to the same end together, and no rank is to blame
        error = f"rank {first}: {error}"
        if hung and "imed out" in error:
            error = f"no step for {timeout:g} minutes (distributed.timeout); rank {first} gave up first, where each stood is said above"
        elif first:
            rank_logs.print_rank_lines(first, group.logs[first - 1].ending())
    record.finish("failed", error)
    return TrainingError(error)


def _cause(group: RankGroup, rank: int, record: RunMetadata) -> str:
    said = group.logs[rank - 1].tail() if rank else []
    return subprocesses.failure_reason(group.codes()[rank] or 0, {} if rank else record.fields, said)
