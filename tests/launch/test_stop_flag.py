"""StopFlag: the first signal sets the flag, the second ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner.launch.signals import DUPLICATE_SIGNAL_WINDOW, STOP_SIGNALS, StopFlag

ROOT = Path(__file__).parents[2]
WAIT = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from runner.launch.signals import StopFlag
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
    time.sleep(1.5 * DUPLICATE_SIGNAL_WINDOW)
    child.send_signal(second)
    assert child.wait(10) == 128 + second
    child.stdout.close()


def test_stop_flag_ignores_a_duplicate_of_the_signal():
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGINT  # and the process has not exited


def test_stop_flag_acknowledges_the_first_signal_once(capfd):
    with StopFlag(announces=True):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # the duplicate
    assert capfd.readouterr().err == "\nSIGHUP: stopping at the start; again to stop now\n"


def test_stop_flag_without_a_terminal_to_write_to_still_stops():
    child = "import os; os.close(2)\n" + WAIT.replace("StopFlag()", "StopFlag(announces=True)").replace("time.sleep(300)", "")
    with subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "SIGHUP\n"
        assert process.wait(10) == 0


def test_stop_flag_leaves_sighup_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
