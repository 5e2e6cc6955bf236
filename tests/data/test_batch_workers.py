"""Stuck, killed and failing data workers: each is named with what happened to it and what it read, the wait ends, and
no worker is left.
"""

import gc
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from row_fixtures import RandomRows, make_loader, names_of, unpacked

from common.errors import StopRequested, TrainingError
from common.paths import REPO_ROOT
from data import background
from data.background import Watch, prefetch
from data.batching import loader
from data.batching.batch import collate
from data.batching.packing import UnpackedSequences
from data.batching.sampler import LengthGroupedSampler
from data.types import EncodedRow

ROWS, BATCH = 24, 2
TIMEOUT = 0.3  # seconds, of the workers; nothing is asserted about how long a wait takes
DEADLINE = 60.0  # seconds after which a test counts as hanging


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """Threads that are blocked for ever are waited for, but not for long."""
    monkeypatch.setattr(background, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(loader, "NAME_SECONDS", 0.1)


def open_many_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    return [open(os.devnull, "rb") for _ in range(9)]


def read_pipe():
    reader, _writer = os.pipe()  # both ends stay open: nothing ever arrives
    os.read(reader, 1)


def raise_unprintable():
    raise ValueError("a\x1b[31mb\nc" + 5000 * "d")


def send_partial_batch():
    """Die in the middle of a message, as a worker does that is killed while it sends a batch."""
    for fd in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
        with suppress(OSError):  # not open any more, or an end for reading
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, b"\x00\x00\x10\x00B")  # the newest socket is that of the batches
                break
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {  # name -> (what the worker does, what the error says)
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), r"is stuck: no progress for 0\.\d s \(data\.worker_timeout\).*: it was stopped \(SIGSTOP\);"),
    "blocked in a read": (read_pipe, r"is stuck: no progress for 0\.\d s"),
    "endless loop": (lambda: threading.Event().wait(), r"is stuck"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by SIGKILL \(out of memory, or kill -9\)"),
    "bus error": (lambda: os.kill(os.getpid(), signal.SIGBUS), r"was killed by SIGBUS \(a file that it reads became shorter"),
    "segmentation fault": (lambda: (signal.signal(signal.SIGSEGV, signal.SIG_DFL), os.kill(os.getpid(), signal.SIGSEGV)), r"was killed by SIGSEGV"),
    "killed while sending": (send_partial_batch, r"was killed by SIGKILL"),
    "exit": (lambda: os._exit(3), r"ended early with exit code 3"),
    "too many files": (open_many_files, r"OSError: \[Errno 24\] Too many open files: .*; raise the limit, e\.g\. ulimit -n"),
    "exception": (raise_unprintable, r"failed while it read row:\d+: ValueError: a\\x1b\[31mb\\nc"),
}  # fmt: skip


class FaultySequences(UnpackedSequences):
    """Sequence `at` of all epochs does `fault()` in a worker when it is read."""

    def __init__(self, fault, at: int) -> None:
        super().__init__(RandomRows([1 + i % 5 for i in range(ROWS)]))
        self.fault, self.at, self.parent = fault, at, os.getpid()

    def __getitem__(self, index: int) -> list[EncodedRow]:
        if index == self.at and os.getpid() != self.parent:
            self.fault()
        return super().__getitem__(index)


def position(phase: str) -> int:
    """Return the number of the sequence that is read first, in the middle, or in the second epoch."""
    loader = make_loader(unpacked(ROWS), BATCH)
    epoch, step = {"first": (0, 0), "middle": (0, 5), "second epoch": (1, 2)}[phase]
    return epoch * ROWS + int(loader.sampler.indices(epoch, step)[1])


def no_workers_left() -> bool:
    return not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("fault", "phase"),
    # Each fault at one moment here, and at the two others in the slow tests.
    [
        pytest.param(fault, phase, marks=[] if number % 3 == moment else [pytest.mark.slow])
        for number, fault in enumerate(FAULTS)
        for moment, phase in enumerate(["first", "middle", "second epoch"])
    ],
)
def test_worker_that_fails_is_named_with_its_row(fault, phase, capfd):
    does, says = FAULTS[fault]
    at = position(phase)
    timeout = TIMEOUT if "stuck" in says else 60.0  # on a busy machine an end of a worker may be seen later
    with closing(
        make_loader(FaultySequences(does, at), BATCH, num_workers=2, worker_timeout=timeout).iter_steps(0, 24)
    ) as steps:
        with pytest.raises(TrainingError, match=says) as error:
            list(steps)
    message = str(error.value)
    assert "data worker " in message and " of 2 (pid " in message and "data.num_workers=0" in message
    assert f"while it read row:{at % ROWS}" in message
    assert message.isprintable() and len(message) < 1000
    assert no_workers_left() and len(capfd.readouterr().err) < 10_000


def test_batch_that_cannot_be_received_ends_the_training(monkeypatch):
    def receive(batch):
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(loader.StepLoader, "_pinning", lambda self: receive)
    with closing(make_loader(unpacked(ROWS), BATCH, num_workers=1, worker_timeout=60.0).iter_steps(0, 1)) as steps:
        with pytest.raises(TrainingError, match="MemoryError: no pinned memory"):
            next(steps)
    assert no_workers_left()


@pytest.mark.slow
def test_worker_has_its_time_limit_from_when_it_is_ready(monkeypatch, tmp_path):
    """Before: stuck after `worker_timeout` seconds in which a busy machine had not started it."""
    ready = tmp_path / "ready"
    now = itertools.count(step=background.WATCH_POLL_SECONDS)

    # the clock of the limit runs as the training process waits; the workers begin when it is far beyond the limit
    def monotonic():
        seconds = next(now)
        if seconds > 10 * TIMEOUT:
            ready.touch()
        return seconds

    def start_late(parent):
        while not ready.exists():
            time.sleep(0.01)

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(background, "kill_with_parent", start_late)
    with closing(make_loader(unpacked(ROWS), BATCH, num_workers=2, worker_timeout=TIMEOUT).iter_steps(0, 1)) as steps:
        assert len(names_of(steps)) == 1 and ready.exists()


def test_worker_that_is_never_ready_is_named(monkeypatch):
    monkeypatch.setattr(loader, "START_SECONDS", 0.3)
    monkeypatch.setattr(background, "kill_with_parent", lambda parent: os.kill(os.getpid(), signal.SIGSTOP))
    with closing(make_loader(unpacked(ROWS), BATCH, num_workers=1, worker_timeout=0.1).iter_steps(0, 1)) as steps:
        with pytest.raises(
            TrainingError,
            match=r"is stuck: not ready after 0\.\d s \(data\.worker_timeout\) while it read its data: it was stopped",
        ):
            list(steps)
    assert no_workers_left()


def test_all_workers_that_fail_print_one_traceback(capfd):
    class AllFail(UnpackedSequences):
        def __getitem__(self, index: int) -> list[EncodedRow]:
            raise KeyError("no such column")

    with pytest.raises(TrainingError, match="data worker 0 of 4 .*KeyError"):
        list(make_loader(AllFail(RandomRows([3] * 40)), num_workers=4).iter_steps(0, 5))
    assert capfd.readouterr().err.count("Traceback (most recent call last)") == 1


def test_batches_before_a_failure_are_yielded():
    expected = names_of(make_loader(unpacked(ROWS), BATCH).iter_steps(0, 5))
    steps = make_loader(FaultySequences(FAULTS["killed"][0], position("middle")), BATCH, num_workers=2).iter_steps(
        0, 12
    )
    found = []
    with pytest.raises(TrainingError), closing(steps):
        for batches in steps:
            found += names_of([batches])
    assert found == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_request_ends_the_wait_for_a_batch(num_workers):
    sequences = FaultySequences(FAULTS["blocked in a read"][0], position("middle"))
    sequences.parent = 0  # in every process
    requested = threading.Event()
    with closing(make_loader(sequences, BATCH, num_workers=num_workers).iter_steps(0, 12, requested.is_set)) as steps:
        for _ in range(5):
            next(steps)
        requested.set()
        with pytest.raises(StopRequested):
            next(steps)
    assert no_workers_left()


def test_reading_in_the_training_process_ends_when_nothing_moves():
    sequences = FaultySequences(FAULTS["blocked in a read"][0], position("middle"))
    sequences.parent = 0
    with closing(make_loader(sequences, BATCH, worker_timeout=TIMEOUT).iter_steps(0, 12)) as steps:
        with pytest.raises(
            TrainingError, match=r"no batch for 0\.\d+ s \(data\.worker_timeout\) while the training process reads"
        ):
            list(steps)


@pytest.mark.slow
def test_slow_worker_that_makes_progress_is_not_stuck():
    class Slow(UnpackedSequences):
        def __getitem__(self, index: int) -> list[EncodedRow]:
            time.sleep(0.2)
            return super().__getitem__(index)

    # one batch: 3.2 s
    steps = names_of(make_loader(Slow(RandomRows([2] * 16)), 16, num_workers=1, worker_timeout=2.0).iter_steps(0, 1))
    assert len(steps[0]) == 16


def test_time_in_which_the_training_process_is_stopped_does_not_count(monkeypatch):
    times = iter([0.0, 3600.0, 3600.1, 3600.2])
    monkeypatch.setattr(background.time, "monotonic", lambda: next(times))
    polls = iter([False, False, True])
    Watch(timeout=1.0).wait_for(lambda seconds: next(polls), lambda seconds: AssertionError(seconds))


def test_closed_loader_kills_a_stopped_worker():
    at = position("first")
    loader = make_loader(FaultySequences(FAULTS["stopped"][0], at), BATCH, num_workers=2, worker_timeout=3.0)
    with closing(loader.iter_steps(0, 12, lambda: True)) as steps:
        with pytest.raises(StopRequested):
            list(steps)
    assert no_workers_left()


def test_prefetch_abandons_a_thread_that_is_blocked():
    released = threading.Event()

    def items():
        yield 1
        released.wait(DEADLINE)
        yield 2

    steps = prefetch(items(), Watch(timeout=0.2), str)
    assert next(steps) == 1
    with pytest.raises(TrainingError):
        next(steps)
    released.set()


@pytest.mark.slow
def test_workers_need_no_file_descriptor_per_batch():
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    with closing(make_loader(unpacked(400), 2, num_workers=2).iter_steps(0, 200)) as steps:
        held = [next(steps) for _ in range(150)]
        assert len(os.listdir("/proc/self/fd")) <= fds + 2 * 3
    assert len(held) == 150 and len(os.listdir("/proc/self/fd")) <= fds


def test_batch_is_the_same_after_its_way_through_a_pipe():
    loader = make_loader(unpacked(7), 4)
    for packed in (False, True):
        loader.collate = partial(collate, pad_id=0, packed=packed)
        for [batch] in loader.iter_epoch(0):
            copy = pickle.loads(pickle.dumps(batch))
            assert copy.names == batch.names
            assert all(
                torch.equal(a, b) if a is not None else b is None
                for a, b in zip(batch.inputs.values(), copy.inputs.values(), strict=True)
            )


def test_sampler_knows_the_size_of_each_step_without_its_items():
    rows = RandomRows([1 + i % 7 for i in range(1003)])
    for sampler in (make_loader(unpacked(1003), 4).sampler, LengthGroupedSampler(1003, 4, 1, rows.lengths)):
        assert [sampler.num_items(1, step) for step in range(sampler.steps_per_epoch)] == [
            len(sampler.indices(1, step)) for step in range(sampler.steps_per_epoch)
        ]


ORPHANS = """
import os, signal, sys, time
sys.path[:0] = ["tests/data"]
from test_batch_workers import *
steps = make_loader(FaultySequences(FAULTS[sys.argv[1]][0], position("middle")), BATCH, num_workers=2).iter_steps(0, 12)
next(steps)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stopped", "blocked in a read"])
def test_stuck_workers_do_not_outlive_a_killed_run(fault):
    run = subprocess.run(
        [sys.executable, "-c", ORPHANS, fault],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO_ROOT,
        timeout=DEADLINE,
        check=False,
    )
    pids = run.stdout.split()
    assert run.returncode == -signal.SIGKILL and pids
    deadline = time.monotonic() + DEADLINE
    while any(
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        for pid in pids
    ):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
