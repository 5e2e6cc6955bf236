"""Stuck, killed and failing tokenizing processes: each is named with what happened to it and its rows, and no store is
left.
"""

import itertools
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from data import background
from data.sources.files import Source
from data.store import cache as cache_module
from data.store import workers
from data.store.cache import load_or_build
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig

TIMEOUT = 2.0  # seconds without a chunk, from when the process is ready
NO_LIMIT = 0.0


def open_many_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    return [open(os.devnull) for _ in range(9)]


def read_pipe():
    reader, _writer = os.pipe()  # both ends stay open: nothing ever arrives
    os.read(reader, 1)


FAULTS = {  # name -> (what a process does, data.worker_timeout, what the error says)
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), TIMEOUT, r"stuck: no rows encoded for 2\.\d s \(data\.worker_timeout\): it was stopped \(SIGSTOP\)"),
    "endless regex": (lambda: re.match("(a|a)+$", 64 * "a" + "b"), TIMEOUT, r"stuck: no rows encoded for 2\.\d s"),
    "blocked in a read": (read_pipe, TIMEOUT, r"stuck: no rows encoded for 2\.\d s"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), NO_LIMIT, r"was killed by SIGKILL \(out of memory, or kill -9\)"),
    "exit": (lambda: os._exit(3), NO_LIMIT, r"ended early with exit code 3"),
    "too many files": (open_many_files, NO_LIMIT, r"Too many open files"),
}  # fmt: skip


@pytest.fixture
def load_with(tmp_path, write, tokenizer, monkeypatch):
    """`load_with(fault, row, timeout)` tokenizes 200 rows in two processes that do `fault` at the chunk with that row."""
    encoding = EncodingConfig(
        "text", "text", tokenizer.folder, max_length=16, too_long="split", loss_on="assistant", on_bad_row="error"
    )
    encode = Encoder.encode
    monkeypatch.setattr(cache_module, "MAX_CHUNK_ROWS", 8)

    def load(fault, row, timeout):
        def faulty(self, source, chunk):
            if chunk and chunk[0][0] >= row:
                fault()
            return encode(self, source, chunk)

        monkeypatch.setattr(Encoder, "encode", faulty)
        source = Source.open(write([{"text": f"row {i} " + "again " * (i % 9)} for i in range(200)]))
        try:
            load_or_build(source, encoding, tokenizer, tmp_path / "cache", num_workers=2, worker_timeout=timeout)
        finally:
            assert not multiprocessing.active_children(), "a process is left"

    return load


SLOW = [
    pytest.param(fault, row, marks=pytest.mark.slow)
    for fault, row in (("stopped", 0), ("endless regex", 100), ("blocked in a read", 0), ("too many files", 0))
]


@pytest.mark.parametrize(("fault", "row"), [("killed", 0), ("exit", 100), *SLOW])
def test_tokenizing_process_that_fails_is_named_with_its_rows(load_with, tmp_path, fault, row):
    does, timeout, says = FAULTS[fault]
    with pytest.raises(UserError, match=says) as error:
        load_with(does, row, timeout)
    assert "tokenizing process " in error.value.message and " of 2 (pid " in error.value.message
    assert "rows.jsonl:" in error.value.setting and int(error.value.setting.rpartition(" to ")[2]) >= row
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name != "contents"] == []


@pytest.mark.slow
def test_tokenizing_process_has_its_time_limit_from_when_it_is_ready(load_with, tmp_path, monkeypatch):
    """Before: stuck after `worker_timeout` seconds in which the process had imported its modules."""
    ready = tmp_path / "ready"
    now = itertools.count(step=background.WATCH_POLL_SECONDS)

    # the clock of the limit runs as the calling process waits; the processes begin when it is far beyond the limit
    def monotonic():
        seconds = next(now)
        if seconds > 3 * TIMEOUT:
            ready.touch()
        return seconds

    def start_late(parent):
        while not ready.exists():
            time.sleep(0.01)

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(background, "kill_with_parent", start_late)
    load_with(lambda: None, 0, TIMEOUT)
    assert ready.exists()


def test_tokenizing_process_that_is_never_ready_is_named(load_with, monkeypatch):
    monkeypatch.setattr(workers, "START_SECONDS", 0.3)
    monkeypatch.setattr(background, "kill_with_parent", lambda parent: os.kill(os.getpid(), signal.SIGSTOP))
    with pytest.raises(
        UserError,
        match=r"tokenizing process [01] of 2 \(pid \d+\) stuck: not ready after 0\.\d s \(data\.worker_timeout\)",
    ):
        load_with(lambda: None, 0, 0.1)


@pytest.mark.slow
def test_tokenizing_processes_may_be_spawned_as_on_macos(load_with, monkeypatch):
    get_context = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: get_context("spawn"))
    load_with(lambda: pytest.fail("a spawned process has a module of its own"), 0, NO_LIMIT)


@pytest.mark.parametrize(
    "started, error",
    [(BaseProcess, OSError(24, "Too many open files")), (threading.Thread, RuntimeError("can't start new thread"))],
    ids=["process", "thread"],
)
def test_tokenizing_processes_that_cannot_be_started_are_refused(started, error, load_with, monkeypatch):
    start, calls = started.start, []

    def failing(each):
        calls.append(each)
        if len(calls) == 2:
            raise error
        start(each)

    monkeypatch.setattr(started, "start", failing)
    with pytest.raises(UserError, match=f"2 tokenizing processes cannot be started: {error.args[-1]}"):
        load_with(lambda: None, 0, NO_LIMIT)


ORPHANS = """
import multiprocessing, os, signal, sys, time, threading
from pathlib import Path
from data import background
from data.sources.files import Source
from data.store import cache as cache_module
from data.store.cache import load_or_build
from data.tokenize.encoder import Encoder
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig
cache_module.MAX_CHUNK_ROWS = 8
folder, run = Path(sys.argv[1]), os.getpid()
tokenizer = Tokenizer.load(Path("data/samples/tokenizer").absolute())
encoding = EncodingConfig("text", "text", tokenizer.folder, max_length=16, too_long="split", loss_on="assistant", on_bad_row="error")
kill_with_parent = background.kill_with_parent
def late(parent):
    while os.getppid() == run:
        time.sleep(0.01)
    kill_with_parent(parent)
if sys.argv[2] == "start":
    background.kill_with_parent = late
Encoder.encode = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)
def is_stuck(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
def kill():
    while len(children := multiprocessing.active_children()) < 2:
        time.sleep(0.01)
    print(*[child.pid for child in children], flush=True)
    while sys.argv[2] != "start" and not any(is_stuck(child.pid) for child in children):
        time.sleep(0.01)
    os.kill(run, signal.SIGKILL)
threading.Thread(target=kill).start()
load_or_build(Source.open(folder / "rows.jsonl"), encoding, tokenizer, folder / "cache", num_workers=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["start", "one is stuck"])
def test_stuck_tokenizing_processes_do_not_outlive_a_killed_run(tmp_path, write, killed):
    write([{"text": f"row {i}"} for i in range(200)])
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(tmp_path), killed], stdout=subprocess.PIPE, text=True, cwd=root, timeout=500, check=False,
    )  # fmt: skip
    pids = run.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 300
    while any(
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        for pid in pids
    ):
        assert time.monotonic() < deadline, "a process outlives its parent"
        time.sleep(0.05)
