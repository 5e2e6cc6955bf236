"""Asked to stop at any moment, a run saves within one step and leaves with 75; continued, no bit differs."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import select
import signal
import struct
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from torch.utils.data._utils import signal_handling
from trainee import STEPS, SlowDisk, code_of, config, launch, litter, record_of, room, steps_of, train

from common import filesystem
from runner.checkpoint import manager
from runner.engine import evaluation, loop
from runner.engine.verify_resume import diff_run_dirs
from runner.launch.signals import DUPLICATE_SIGNAL_WINDOW, STOP_SIGNALS, StopFlag
from runner.run_dir import initial_weights
from runner.run_dir.metadata import RunMetadata

MOMENTS = ("start-up", "step", "save", "evaluation", "samples")
EVENT = struct.Struct("bd")  # which moment, when; the moment's number comes again, plus 64, when it is over
HELD = 5.0  # seconds a small run may take from the signal to its end


class Watched:
    """Tells of a child from inside: moments begin and end in a pipe, and what a signal interrupted stands in shared memory."""

    def __init__(self) -> None:
        self.shared = mmap.mmap(-1, 3)  # heard or not, the moment, steps done
        self.reader, self.writer = os.pipe()
        self.moment, self.done = 0, 0

    def install(self) -> None:
        """In the child, which leads a group of its own: its data workers get the signals too."""
        os.setpgid(0, 0)
        os.close(self.reader)
        filesystem.fs = SlowDisk()
        for number, (owner, name) in enumerate([(loop, "train_step"), (manager, "save"), (evaluation, "evaluate"), (evaluation, "samples")], start=1):
            setattr(owner, name, self._told(number, getattr(owner, name)))
        for name in ("begin", "take_step"):
            setattr(loop, name, self._counted(getattr(loop, name)))
        leader, enter, raised = os.getpid(), StopFlag.__enter__, StopFlag._raise

        def entering(flag):
            enter(flag)
            self._tell(0)
            return flag

        def heard(flag, number, frame):
            if os.getpid() == leader:  # a data worker has the same handler until it begins
                self.shared[:] = bytes([1, self.moment, self.done])
            raised(flag, number, frame)

        StopFlag.__enter__, StopFlag._raise = entering, heard

    def _told(self, number, function):
        def told(run, *args):
            if number == 1 and self.moment == 0:
                self._tell(64)
            self._tell(number)
            before, self.moment = self.moment, number
            try:
                return function(run, *args)
            finally:
                self.moment = before if number == 2 else 1  # between two steps counts as a step
                self._tell(number + 64)

        return told

    def _counted(self, function):
        def counted(run, *args):
            found = function(run, *args)
            self.done = run.progress.step
            return found

        return counted

    def _tell(self, number: int) -> None:
        os.write(self.writer, EVENT.pack(number, time.monotonic()))

    def events(self):
        """In the parent, until nobody holds the other end: not the child, nor a data worker it left behind."""
        os.close(self.writer)
        while select.select([self.reader], [], [], 60)[0]:
            if not (event := os.read(self.reader, EVENT.size)):
                return os.close(self.reader)
            yield EVENT.unpack(event)
        raise AssertionError("neither news nor an end for a minute")


def undisturbed(cfg, folder: Path) -> dict[int, float]:
    """Train to the end; returns how long each moment takes, in seconds."""
    watched = Watched()
    child = launch(cfg, folder, watched.install)
    events = list(watched.events())
    assert code_of(child) == 0, (folder.parent / "said").read_text()[-2000:]
    began, spent = {}, defaultdict(list)
    for number, when in events:
        if number < 64:
            began[number] = when
        else:
            spent[number - 64].append(when - began[number - 64])
    return {number: sum(times) / len(times) for number, times in spent.items()}


def signalled(cfg, folder: Path, number: int, moment: int, nth: int, delay: float) -> tuple[int, bytes, float]:
    """Launch, and signal the whole group in the nth such moment, if it comes: exit code, what was interrupted, seconds to the end."""
    watched = Watched()
    child = launch(cfg, folder, watched.install)
    sent = None
    for event, _ in watched.events():
        nth -= event == moment
        if nth == 0 and sent is None:
            time.sleep(delay)
            sent = time.monotonic()
            os.killpg(child, number)
    return code_of(child), bytes(watched.shared), time.monotonic() - (sent or time.monotonic())


@pytest.mark.parametrize("signals", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_saves_within_a_step_and_costs_no_bit(signals, tmp_path):
    chance, seen, longest = random.Random(signals), Counter(), 0.0

    def next_signal(folder: Path) -> int:
        """Launch for the next signal, or to the end if there were enough; returns the exit code."""
        nonlocal longest
        moment = seen.total() % len(MOMENTS)
        nth = STEPS + 1 if seen.total() == target else chance.randint(1, 3) if moment else 1
        before = max(steps_of(folder), default=0)
        code, (heard, interrupted, done), seconds = signalled(cfg, folder, chance.choice(STOP_SIGNALS), moment, nth, chance.uniform(0, 0.5 * took[moment]))
        assert code in (0, 75), (folder.parent / "said").read_text()[-2000:]
        if code == 75:
            newest, done = max(steps_of(folder)), max(done, before)  # before it has looked for checkpoints the child knows of no step
            assert heard and done <= newest <= done + 1, f"{done} steps were done, {newest} are saved"
            assert (record_of(folder)["status"], record_of(folder)["step"]) == ("interrupted", newest)
            seen[MOMENTS[interrupted]] += 1
            longest = max(longest, seconds)
        return code

    with room(tmp_path) as place:
        for workers in (0, 2):
            cfg = config(place, f"data.num_workers={workers}", "train.save_every=2", "train.eval_every=3", "train.sample_every=2")
            took = undisturbed(cfg, whole := place / f"whole{workers}")
            target = seen.total() + signals // 2
            for run in itertools.takewhile(lambda _: seen.total() < target, itertools.count()):  # noqa: B023  asked at once
                folder = place / f"run{workers}-{run}"
                while next_signal(folder):
                    pass
                assert diff_run_dirs(whole, folder) == []
                assert record_of(folder)["status"] == "completed" and not litter(folder)
    print(f"{dict(seen)}, at most {longest:.2f} s from the signal to the end")
    assert longest < HELD and seen.total() == signals
    assert signals < 50 or seen.keys() == set(MOMENTS)


def test_a_signal_to_the_group_finds_data_workers_that_only_just_start(tmp_path):
    def start_slowly():
        os.setpgid(0, 0)
        handle = signal_handling._set_worker_signal_handlers

        def handle_and_wait():  # torch's own handlers are in place, ours may not be yet
            handle()
            (place / "starting").touch()
            time.sleep(1)

        signal_handling._set_worker_signal_handlers = handle_and_wait

    with room(tmp_path) as place:
        cfg = config(place, "data.num_workers=2")
        child = launch(cfg, place / "run", start_slowly)
        while not (place / "starting").exists():
            time.sleep(0.01)
        os.killpg(child, signal.SIGTERM)
        assert code_of(child) == 75, (place / "said").read_text()[-2000:]
        assert steps_of(place / "run") == [1]


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("owner, name", [(initial_weights, "fingerprints"), (RunMetadata, "running")], ids=["before", "after"])
def test_a_signal_before_training_begins_leaves_a_folder_that_can_be_used(number, owner, name, tmp_path):
    """Nothing is caught yet: there is nothing to save."""
    function = getattr(owner, name)

    def struck(*args, **words):
        found = function(*args, **words)
        os.kill(os.getpid(), number)
        return found

    with room(tmp_path) as place:
        cfg = config(place)
        assert train(cfg, place / "whole") == 0
        assert train(cfg, place / "run", lambda: setattr(owner, name, struck)) not in (0, 75)
        assert train(cfg, place / "run") == 0
        assert diff_run_dirs(place / "whole", place / "run") == []


def test_a_second_signal_leaves_at_once_and_the_save_before_stands(tmp_path):
    def hang_at_step_4():
        step = loop.train_step
        loop.train_step = lambda run, *args: (run.progress.step == 3 and time.sleep(30), step(run, *args))[1]

    with room(tmp_path) as place:
        cfg = config(place)
        assert train(cfg, place / "whole") == 0
        child = launch(cfg, place / "run", hang_at_step_4)
        while not (place / "run" / "checkpoints" / "step-00000003").exists():
            time.sleep(0.01)
        os.kill(child, signal.SIGTERM)
        time.sleep(1.5 * DUPLICATE_SIGNAL_WINDOW)
        sent = time.monotonic()
        os.kill(child, signal.SIGINT)
        assert code_of(child) == 128 + signal.SIGINT and time.monotonic() - sent < 1
        assert steps_of(place / "run")[-1] == 3
        assert train(cfg, place / "run") == 0
        assert diff_run_dirs(place / "whole", place / "run") == []
