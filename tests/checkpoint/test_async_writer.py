"""AsyncWriter: jobs run one at a time in the background, errors are returned, process exit waits for the last job."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

from runner.checkpoint import atomic_dir
from runner.checkpoint.saving import AsyncWriter

ROOT = Path(__file__).parents[2]


def test_async_writer_runs_one_job_at_a_time_in_the_background() -> None:
    writer, gate, order = AsyncWriter(), threading.Event(), []
    writer.submit("first", lambda: (gate.wait(120), order.append(1)))
    assert writer.poll() == [] and order == []
    threading.Timer(0.2, gate.set).start()
    writer.submit("second", lambda: order.append(2))  # waits for the first job
    assert order[0] == 1
    results = writer.wait()
    assert order == [1, 2] and [(result.name, result.error) for result in results] == [
        ("first", None),
        ("second", None),
    ]
    assert results[0].seconds > 0.1 and writer.poll() == []


def test_async_writer_returns_the_error_of_a_job() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "broken disk")

    writer = AsyncWriter()
    writer.submit("bad", fail)
    writer.submit("good", lambda: None)
    assert [(result.name, type(result.error)) for result in writer.wait()] == [("bad", OSError), ("good", type(None))]


EXITING_PROGRAM = """
import sys, time
from pathlib import Path
from runner.checkpoint.saving import AsyncWriter
from runner.checkpoint.atomic_dir import write_atomic_dir

def slow_content():
    time.sleep(0.3)
    yield bytes(9000)

AsyncWriter().submit("last", lambda: write_atomic_dir(Path(sys.argv[1]), "step-00000001", {"model": slow_content()}, {}))
sys.exit(3)
"""


def test_process_exit_waits_for_the_last_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITING_PROGRAM, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (3, "")
    newest, _ = atomic_dir.newest_valid(tmp_path)
    assert newest is not None and newest.name == "step-00000001"
