"""StopFlag: the first signal sets the flag, the second ends the process."""

from __future__ import annotations

import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from common.errors import STOP_SIGNALS, StopRequested
from runner.engine.device import signals
from runner.engine.device.signals import CtrlC, SignalForwarder, StopFlag

ROOT = Path(__file__).parents[2]
# every further signal is a second request, however soon it comes
NO_DUPLICATES = "from runner.engine.device import signals; signals.DUPLICATE_SIGNAL_WINDOW = -1.0"
WAIT = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
{NO_DUPLICATES}
from runner.engine.device.signals import StopFlag
with StopFlag() as stop:
    print("ready", flush=True)
    while not stop():
        time.sleep(0.01)
    print(stop.signal.name, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_flag_is_set_by_a_signal_and_restores_handlers(number):
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopFlag() as stop:
        assert not stop() and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop() and stop.signal == number
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_stop_flag_second_signal_ends_the_process(second):
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "SIGTERM\n"
    child.send_signal(second)
    assert child.wait(60) == 128 + second
    child.stdout.close()


@pytest.fixture
def every_signal_is_a_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that stops this process for a second between two signals."""
    monkeypatch.setattr(signals, "DUPLICATE_SIGNAL_WINDOW", math.inf)


@pytest.mark.usefixtures("every_signal_is_a_duplicate")
def test_stop_flag_ignores_a_duplicate_of_the_signal():
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGINT  # and the process has not exited


@pytest.mark.usefixtures("every_signal_is_a_duplicate")
def test_stop_flag_acknowledges_the_first_signal_once(capfd):
    with StopFlag(announces=True):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # the duplicate
    assert capfd.readouterr().err == "\nSIGHUP: stopping as soon as possible; again to stop now\n"


def written_to(terminal: int) -> str:
    """Return all that was written to the other end of `terminal`, which is closed; it may arrive in parts."""
    parts = []
    with suppress(OSError):  # EIO: the end
        while part := os.read(terminal, 1000):
            parts.append(part)
    return b"".join(parts).decode()


@pytest.mark.parametrize(("term", "erase", "cursor"), [("xterm", "\r\x1b[2K", "\x1b[?25h\r\n"), ("dumb", "\r\n", "")])
def test_stop_flag_replaces_the_bar_of_a_terminal_and_shows_its_cursor_again(
    term: str, erase: str, cursor: str
) -> None:
    terminal, child_end = os.openpty()
    program, env = WAIT.replace("StopFlag()", "StopFlag(announces=True)"), {**os.environ, "TERM": term}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=child_end, text=True, env=env
    ) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 130
    os.close(child_end)
    assert written_to(terminal) == f"{erase}SIGINT: stopping as soon as possible; again to stop now\r\n{cursor}"
    os.close(terminal)


def test_stop_flag_without_a_terminal_to_write_to_still_stops():
    child = "import os; os.close(2)\n" + WAIT.replace("StopFlag()", "StopFlag(announces=True)").replace(
        "time.sleep(300)", ""
    )
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)  # SIGHUP is ignored where the tests run under nohup
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.wait(60) == 0


def test_stop_flag_takes_no_message_for_a_signal_without_stdout() -> None:
    ready, child_end = os.pipe()
    wait = WAIT.replace("StopFlag()", "StopFlag(announces=True)").partition("    print")[0]
    program = f"import os; os.close(1); os.close(2)\n{wait}    os.close({child_end})\n    while not stop(): time.sleep(0.01)\n    time.sleep(0.2)\n"
    with subprocess.Popen([sys.executable, "-c", program], pass_fds=[child_end]) as process:
        os.close(child_end)
        assert os.read(ready, 1) == b""  # the child has closed its end
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    os.close(ready)


def test_stop_flag_leaves_sighup_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def in_c_code(block: str, setup: str = "") -> subprocess.Popen:
    """Start a process whose main thread is in a C function, as in a compilation, within `block`: Python handlers do not
    run there.
    """
    program = f"""
import ctypes, signal, sys; sys.path.insert(0, {str(ROOT)!r})
{setup}
from runner.engine.device.signals import CtrlC, StopFlag
with {block}:
    print("ready", flush=True)
    signal.siginterrupt(signal.SIGTERM, False), signal.siginterrupt(signal.SIGINT, False)
    libc = ctypes.CDLL(None)
    libc.fread(ctypes.create_string_buffer(2), 1, 2, ctypes.c_void_p.in_dll(libc, "stdin"))  # restarted after each signal
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("1")  # the first of the two bytes that the call waits for
    child.stdin.flush()
    while unread_bytes(child.stdin.fileno()) and child.poll() is None:
        time.sleep(0.01)
    return child


def unread_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_stop_flag_ends_at_the_second_signal_in_c_code():
    block = "StopFlag(announces=True) as stop, stop.working_on('after this micro-batch, then saving')"
    with in_c_code(block, NO_DUPLICATES) as child:
        child.send_signal(signal.SIGTERM)
        assert select.select([child.stderr], [], [], 100)[0], "no acknowledgement"
        assert [child.stderr.readline(), child.stderr.readline()] == [
            "\n",
            "SIGTERM: stopping after this micro-batch, then saving; again to stop now\n",
        ]
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 128 + signal.SIGINT


def test_ctrl_c_ends_a_command_in_c_code_without_a_traceback():
    with in_c_code("CtrlC()") as child:
        child.send_signal(signal.SIGINT)
        assert (child.wait(60), child.stderr.read()) == (130, "\ninterrupted\n")


def test_ctrl_c_is_a_keyboard_interrupt_where_python_runs():
    with CtrlC():
        for _ in range(2):  # a conversation continues after the first
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)


def test_interrupting_block_ends_at_the_signal_and_later_ones_at_once():
    entered = []
    with StopFlag() as stop:
        with pytest.raises(StopRequested), stop.interrupting("before the first step"):
            entered.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
            entered.append(2)
        with pytest.raises(StopRequested), stop.interrupting("the export"):
            entered.append(3)
    assert entered == [1]


def test_interrupting_block_ends_at_a_signal_in_a_destructor(capfd):
    """Python ignores what a destructor raises: the export went on, and a traceback was printed."""

    class Slow:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    with StopFlag() as stop:
        with pytest.raises(StopRequested), stop.interrupting("the export"):
            Slow()
            for _ in range(100):
                time.sleep(0.1)
            pytest.fail("the signal was lost")
        time.sleep(0.3)  # the repeated signal is not taken for a second request
    assert "Traceback" not in capfd.readouterr().err


def test_stop_flag_ignores_signals_of_a_forked_worker():
    with StopFlag() as stop:
        if not (worker := os.fork()):
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        os.waitpid(worker, 0)
        time.sleep(0.1)
        assert not stop()


def test_stop_request_between_two_launches_names_no_micro_batch(capfd: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with SignalForwarder() as forwarder:
        forwarder.forward_to([ended])
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "\nSIGTERM: stopping before the training starts; again to stop now\n"
