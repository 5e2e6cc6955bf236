"""Stuck, killed and failing tokenizing processes: each is named with what happened to it and its rows, and no store is
left.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UserError
from common.registry import PLUGINS_ENV
from data import background
from data.sources.files import Source
from data.store import cache as cache_module
from data.store import workers
from data.store.cache import load_or_build
from data.types import EncodingConfig

TIMEOUT = 2.0  # seconds without a chunk, from when the process is ready
NO_LIMIT = 0.0
PLUGIN = """
import os, re, signal, sys, time
{start}
from data.tokenize.encoder import Encoder

encode = Encoder.encode


def faulty(self, source, chunk):
    if chunk and chunk[0][0] >= {row}:
        {fault}
    return encode(self, source, chunk)


Encoder.encode = faulty
"""
FAULTS = {  # name -> (what a process does, data.worker_timeout, what the error says)
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", TIMEOUT, r"stuck: no rows encoded for 2\.\d s \(data\.worker_timeout\): it was stopped \(SIGSTOP\)"),
    "endless regex": ("re.match('(a|a)+$', 64 * 'a' + 'b')", TIMEOUT, r"stuck: no rows encoded for 2\.\d s"),
    "blocked in a read": ("os.read(os.pipe()[0], 1)", TIMEOUT, r"stuck: no rows encoded for 2\.\d s"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", NO_LIMIT, r"was killed by SIGKILL \(out of memory, or kill -9\)"),
    "exit": ("os._exit(3)", NO_LIMIT, r"ended early with exit code 3"),
    "too many files": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)); [open(os.devnull) for _ in range(9)]", NO_LIMIT, r"Too many open files"),
}  # fmt: skip


@pytest.fixture
def load_with(tmp_path, write, tokenizer, monkeypatch):
    """`load_with(fault, row, timeout, start)` tokenizes 200 rows in two processes that do `start` at once and `fault`
    at the chunk with that row.
    """
    encoding = EncodingConfig(
        "text", "text", tokenizer.folder, max_length=16, too_long="split", loss_on="assistant", on_bad_row="error"
    )
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(popen(*args, **options)) or started[-1]
    )
    monkeypatch.setattr(cache_module, "MAX_CHUNK_ROWS", 8)

    def load(fault, row, timeout, start=""):
        (tmp_path / "faulty.py").write_text(PLUGIN.format(fault=fault, row=row, start=start))
        monkeypatch.setenv(PLUGINS_ENV, json.dumps([str(tmp_path / "faulty.py")]))
        source = Source.open(write([{"text": f"row {i} " + "again " * (i % 9)} for i in range(200)]))
        try:
            load_or_build(source, encoding, tokenizer, tmp_path / "cache", num_workers=2, worker_timeout=timeout)
        finally:
            assert all(process.poll() is not None for process in started), "a process is left"

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

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setenv("READY", str(ready))
    load_with("pass", 0, TIMEOUT, start="while not os.path.exists(os.environ['READY']): time.sleep(0.01)")
    assert ready.exists()


def test_tokenizing_process_that_is_never_ready_is_named(load_with, monkeypatch):
    monkeypatch.setattr(workers, "START_SECONDS", 0.3)
    with pytest.raises(
        UserError,
        match=r"tokenizing process 0 of 2 \(pid \d+\) stuck: not ready after 0\.\d s \(data\.worker_timeout\)",
    ):
        load_with("pass", 0, 0.1, start="os.kill(os.getpid(), signal.SIGSTOP)")


def test_tokenizing_processes_that_cannot_be_started_are_refused(load_with, tmp_path, monkeypatch):
    popen, calls = subprocess.Popen, []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(24, "Too many open files")
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", failing)
    with pytest.raises(UserError, match="2 tokenizing processes cannot be started: Too many open files"):
        load_with("pass", 0, NO_LIMIT)


ORPHANS = """
import os, signal, subprocess, sys, time, threading
sys.path[:0] = ["tests/data", sys.argv[1]]
os.environ["KILLED_RUN"] = str(os.getpid())  # a worker waits at its start until this process is dead
from pathlib import Path
from data.sources.files import Source
from data.store import cache as cache_module, workers
from data.store.cache import load_or_build
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig
cache_module.MAX_CHUNK_ROWS = 8
folder = Path(sys.argv[1])
tokenizer = Tokenizer.load(Path("data/samples/tokenizer").absolute())
encoding = EncodingConfig("text", "text", tokenizer.folder, max_length=16, too_long="split", loss_on="assistant", on_bad_row="error")
popen, send, pids, sent = subprocess.Popen, workers._send, [], []
def recorded(*args, **options):
    process = popen(*args, **options)
    pids.append(process.pid)
    print(process.pid, flush=True)
    return process
def counted(*args):
    send(*args)
    sent.append(args)
subprocess.Popen, workers._send = recorded, counted
def is_stuck(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
def kill():
    while len(sent) < 4 if sys.argv[2] == "start" else not any(is_stuck(pid) for pid in pids):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill).start()
load_or_build(Source.open(folder / "rows.jsonl"), encoding, tokenizer, folder / "cache", num_workers=2)
"""


@pytest.mark.slow
# start: both have their first chunk and import their modules
@pytest.mark.parametrize("killed", ["start", "one is stuck"])
def test_stuck_tokenizing_processes_do_not_outlive_a_killed_run(tmp_path, write, killed):
    write([{"text": f"row {i}"} for i in range(200)])
    (tmp_path / "faulty.py").write_text(PLUGIN.format(fault="os.kill(os.getpid(), signal.SIGSTOP)", row=0, start=""))
    if killed == "start":
        (tmp_path / "sitecustomize.py").write_text(
            "import os, time\nwhile os.getppid() == int(os.environ.get('KILLED_RUN', 0)): time.sleep(0.01)"
        )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", ORPHANS, str(tmp_path), killed], stdout=subprocess.PIPE, text=True, cwd=root, timeout=500, check=False,
        env={**os.environ, PLUGINS_ENV: json.dumps([str(tmp_path / "faulty.py")])},
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
