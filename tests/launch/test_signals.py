"""A stop signal at any phase: the run saves within one step, exits with 75, and resumes bitwise equal."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import select
import shutil
import signal
import struct
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from fault_counts import faults
from trainee import (
    STEPS,
    TIMEOUT,
    SlowDisk,
    launch,
    make_config,
    memory_dir,
    read_output,
    read_run_json,
    saved_steps,
    temp_files,
    train,
    wait_for_exit,
)

from common import filesystem
from data import background
from data.store import cache
from data.store.writer import StoreWriter
from runner.checkpoint.manager import CheckpointManager
from runner.engine import build, evaluation, loop
from runner.engine.device.signals import DUPLICATE_SIGNAL_WINDOW, StopFlag, handled_signals
from runner.engine.verify_resume import diff_run_dirs
from runner.launch import run as run_module
from runner.run_dir.metadata import RunMetadata

PHASES = ("start-up", "step", "save", "evaluation", "samples", "tokenizing", "end")
TOKENIZING, END = 5, 6
REACTION_DEADLINE = 10  # seconds: ten times what is promised, for a busy machine
EVENT = struct.Struct("bd")  # (phase, time); phase + 64 marks its end


class PhaseProbe:
    """Reports from a child process: phases through a pipe, what a signal interrupted through shared memory.

    With `held` = (phase, n) the child waits for the signal at the beginning of the n-th such phase: that one is
    interrupted, on any machine.
    """

    def __init__(self, held: tuple[int, int] | None = None) -> None:
        self.shared = mmap.mmap(-1, 11)  # signal received, phase, steps done, time at which the watcher has received it
        self.reader, self.writer = os.pipe()
        self.phase, self.done = 0, 0
        self.held, self.begun = held, Counter()

    def install(self) -> None:
        """In the child, which leads a session: its data workers get the signals too."""
        os.close(self.reader)
        filesystem.fs = SlowDisk()
        for number, (owner, name) in enumerate(
            [
                (loop, "train_step"), (CheckpointManager, "save_async"), (evaluation, "evaluate_loss"), (evaluation, "generate_samples"),
                (build, "build_data_pipeline"), (loop, "export_model"),
            ],
            start=1,
        ):  # fmt: skip
            setattr(owner, name, self._reporting(number, getattr(owner, name)))
        for name in ("start_or_resume", "step_with_retries"):
            setattr(loop, name, self._counted(getattr(loop, name)))
        leader, enter, raised, watched = os.getpid(), StopFlag.__enter__, StopFlag._handle, StopFlag._receive

        def entering(flag):
            enter(flag)
            self._report(0)
            return flag

        def received(flag, number, frame):
            if os.getpid() == leader:  # a data worker has the same handler until it begins
                self.shared[:3] = bytes([1, self.phase, self.done])
            raised(flag, number, frame)

        def watching(flag, number):
            self.shared[3:] = struct.pack("d", time.monotonic())
            watched(flag, number)

        StopFlag.__enter__, StopFlag._handle, StopFlag._receive = entering, received, watching

    def _reporting(self, number, function):
        def reporting(run, *args):
            if number == 1 and self.phase == 0:
                self._report(64)
            before, self.phase = self.phase, number
            self._report(number)
            try:
                return function(run, *args)
            finally:
                # between two steps counts as a step
                self.phase = before if number in (2, TOKENIZING) else END if number == END else 1
                self._report(number + 64)

        return reporting

    def _counted(self, function):
        def counted(run, *args):
            found = function(run, *args)
            self.done = run.progress.step
            return found

        return counted

    def _report(self, number: int) -> None:
        os.write(self.writer, EVENT.pack(number, time.monotonic()))
        self.begun[number] += 1
        if self.held == (number, self.begun[number]):
            while not self.shared[0]:
                time.sleep(0.001)

    def events(self):
        """Yield events in the parent until the child and its data workers have closed the pipe."""
        os.close(self.writer)
        while select.select([self.reader], [], [], 500)[0]:
            if not (event := os.read(self.reader, EVENT.size)):
                return os.close(self.reader)
            yield EVENT.unpack(event)
        raise AssertionError("no event within 500 s")


def phase_durations(cfg, folder: Path) -> dict[int, float]:
    """Train to the end; return the mean duration of each phase in seconds."""
    probe = PhaseProbe()
    child = launch(cfg, folder, probe.install)
    events = list(probe.events())
    assert wait_for_exit(child) == 0, read_output(folder)
    began, spent = {}, defaultdict(list)
    for number, when in events:
        if number < 64:
            began[number] = when
        else:
            spent[number - 64].append(when - began[number - 64])
    return {number: sum(times) / len(times) for number, times in spent.items()}


def train_with_signal(
    cfg, folder: Path, number: int, phase: int, nth: int, delay: float | None
) -> tuple[int, bytes, float, float]:
    """Launch and signal the process group in the nth such phase, `delay` after it began: (exit code, what was
    interrupted, seconds until it was received, and to the end). Without a delay the phase waits for the signal.
    """
    probe = PhaseProbe((phase, nth) if delay is None else None)
    child = launch(cfg, folder, probe.install)
    sent = None
    for event, _ in probe.events():
        nth -= event == phase
        if nth == 0 and sent is None:
            time.sleep(delay or 0)
            sent = time.monotonic()
            child.send(number, to_group=True)
    code, ended = wait_for_exit(child), time.monotonic()
    return (
        code,
        bytes(probe.shared[:3]),
        struct.unpack("d", probe.shared[3:])[0] - (sent or ended),
        ended - (sent or ended),
    )


@pytest.mark.slow(long=True)
def test_signal_at_any_phase_saves_within_a_step_bitwise(tmp_path):
    signals = faults(14, full=50)
    chance, seen, latest, longest = random.Random(50), Counter(), 0.0, 0.0

    def next_signal(folder: Path) -> int:
        """Launch for the next signal, or to the end after the last; return the exit code."""
        nonlocal latest, longest
        phase = seen.total() % len(PHASES)
        nth = STEPS + 1 if seen.total() == target else chance.randint(1, 3) if 0 < phase < TOKENIZING else 1
        before = max(saved_steps(folder), default=0)
        if phase == TOKENIZING:
            shutil.rmtree(root / "cache", ignore_errors=True)
        delay = chance.uniform(0, 0.5 * took[phase]) if seen.total() // len(PHASES) % 2 else None
        code, (received, interrupted, done), reaction, seconds = train_with_signal(
            cfg, folder, chance.choice(handled_signals()), phase, nth, delay
        )
        assert code in (0, 75), read_output(folder)
        if code == 75:
            # before it reads the checkpoint the child has read no step
            newest, done = max(saved_steps(folder), default=0), max(done, before)
            assert received and done <= newest <= done + 1, f"{done} steps were done, {newest} are saved"
            assert (read_run_json(folder)["status"], read_run_json(folder)["step"]) == ("interrupted", newest)
            seen[PHASES[interrupted]] += 1
            latest, longest = max(latest, reaction), max(longest, seconds)
        return code

    with memory_dir(tmp_path) as root:
        for workers in (0, 2):
            cfg = make_config(
                root, f"data.num_workers={workers}", "train.save_every=2", "train.eval_every=3", "train.sample_every=2"
            )
            took = phase_durations(cfg, whole := root / f"whole{workers}")
            target = seen.total() + signals // 2
            for run in itertools.takewhile(lambda _: seen.total() < target, itertools.count()):  # noqa: B023  evaluated at once
                folder = root / f"run{workers}-{run}"
                while next_signal(folder):
                    pass
                assert diff_run_dirs(whole, folder) == []
                assert read_run_json(folder)["status"] == "completed" and not temp_files(folder)
    print(f"{dict(seen)}, received within {latest:.3f} s, at most {longest:.2f} s from the signal to the end")
    assert latest < REACTION_DEADLINE
    assert seen.total() == signals
    assert seen.keys() == set(PHASES)


@pytest.mark.slow
def test_signal_to_the_group_while_data_workers_start(tmp_path):
    def start_slowly():
        background.kill_with_parent = lambda parent: ((root / "starting").touch(), time.sleep(20))

    with memory_dir(tmp_path) as root:
        cfg = make_config(root, "data.num_workers=2")
        child = launch(cfg, root / "run", start_slowly)
        deadline = time.monotonic() + 500
        while not (root / "starting").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send(signal.SIGTERM, to_group=True)
        assert wait_for_exit(child) == 75, read_output(root / "run")
        assert (read_run_json(root / "run")["status"], saved_steps(root / "run")) == ("interrupted", [])
        assert train(cfg, root / "run") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, owner, name",
    [
        (signal.SIGTERM, run_module, "compatibility_fingerprints"),
        pytest.param(signal.SIGUSR1, RunMetadata, "mark_running", marks=pytest.mark.slow),
    ],
    ids=["before run.json says running", "after"],
)
def test_signal_before_training_leaves_a_usable_folder(number, owner, name, tmp_path):
    """No handler is installed yet: there is nothing to save."""
    function = getattr(owner, name)

    def with_signal(*args, **options):
        result = function(*args, **options)
        os.kill(os.getpid(), number)
        return result

    with memory_dir(tmp_path) as root:
        cfg = make_config(root)
        assert train(cfg, root / "whole") == 0
        assert train(cfg, root / "run", lambda: setattr(owner, name, with_signal)) not in (0, 75)
        assert train(cfg, root / "run") == 0
        assert diff_run_dirs(root / "whole", root / "run") == []


@pytest.mark.slow
def test_second_signal_exits_and_keeps_the_last_checkpoint(tmp_path):
    def hang_at_step_4():
        step = loop.train_step
        loop.train_step = lambda run, *args: (run.progress.step == 3 and hang(), step(run, *args))[1]

    def hang():
        (root / "hangs").touch()
        time.sleep(60)

    with memory_dir(tmp_path) as root:
        cfg = make_config(root)
        assert train(cfg, root / "whole") == 0
        child = launch(cfg, root / "run", hang_at_step_4)
        deadline = time.monotonic() + TIMEOUT
        while not ((root / "hangs").exists() and (root / "run" / "checkpoints" / "step-00000003").exists()):
            assert time.monotonic() < deadline, read_output(root / "run")
            time.sleep(0.01)
        child.send(signal.SIGTERM)
        time.sleep(1.5 * DUPLICATE_SIGNAL_WINDOW)
        child.send(signal.SIGINT)
        assert wait_for_exit(child) == 128 + signal.SIGINT
        assert saved_steps(root / "run")[-1] == 3
        assert train(cfg, root / "run") == 0
        assert diff_run_dirs(root / "whole", root / "run") == []


@pytest.mark.slow
def test_signal_while_tokenizing_stops_between_chunks(tmp_path):
    def signal_in_second_chunk():
        cache.MAX_CHUNK_ROWS, cache.REPORT_EVERY = 2, 0
        append = StoreWriter.append

        def append_with_signal(writer, block):
            append(writer, block)
            with open(chunks, "a") as file:
                file.write("chunk\n")
            if len(chunks.read_text().splitlines()) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        StoreWriter.append = append_with_signal

    with memory_dir(tmp_path) as root:
        cfg, chunks = make_config(root), root / "chunks"
        assert train(cfg, root / "run", signal_in_second_chunk) == 75, read_output(root / "run")
        assert len(chunks.read_text().splitlines()) == 2
        assert [
            path.name for path in (root / "cache").rglob("*") if path.name != "contents" and path.suffix != ".json"
        ] == []
        assert (read_run_json(root / "run")["status"], saved_steps(root / "run")) == ("interrupted", [])
        assert "stopped before the first step" in read_output(root / "run")
        assert train(cfg, root / "run") == 0, read_output(root / "run")
        assert train(cfg, root / "whole") == 0
        assert diff_run_dirs(root / "whole", root / "run") == []
