"""A signal raises a flag and nothing else; a second one ends the process at once."""

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
    time.sleep(30)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_raises_the_flag_and_the_old_handlers_come_back(number):
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with StopFlag() as stop:
        assert not stop() and stop.signal is None
        os.kill(os.getpid(), number)
        assert stop() and stop.signal == number
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before


@pytest.mark.parametrize("second", STOP_SIGNALS)
def test_a_second_signal_leaves_at_once(second):
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "SIGTERM\n"
    time.sleep(1.5 * DUPLICATE_SIGNAL_WINDOW)
    sent = time.monotonic()
    child.send_signal(second)
    assert child.wait(10) == 128 + second and time.monotonic() - sent < 1
    child.stdout.close()


def test_the_echo_of_one_signal_is_not_a_second_one():
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGINT  # and we are still here
