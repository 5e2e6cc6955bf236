"""Trainings whose data workers are stopped, killed or fail: the error names the worker, the last completed step is
saved, and a resume loses nothing.
"""

import multiprocessing
import os
import signal
import threading

import pytest

from common.errors import Interrupted, TrainingError
from data import background
from data.batching import packing
from runner.checkpoint.format import read_newest_state
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

FAULTS = {
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), r"data worker \d of 2 \(pid \d+\) is stuck: no progress for \d\.\d s .* while it read .*:\d+.*: it was stopped \(SIGSTOP\)"),
    "blocked": (lambda: os.read(os.pipe()[0], 1), r"data worker \d of 2 \(pid \d+\) is stuck"),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), r"data worker \d of 2 \(pid \d+\) was killed by SIGKILL .* while it read .*:\d+"),
    "raises": (lambda: 1 / 0, r"data worker \d of 2 \(pid \d+\) failed while it read .*:\d+.*: ZeroDivisionError: division by zero"),
}  # fmt: skip
STUCK = ("stopped", "blocked")
RUN = ["data.num_workers=2", "data.val_fraction=0.3", "train.eval_every=3", "train.epochs=2"]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(background, "GRACE_SECONDS", 0.05)


class Faulty:
    """Sequences of which the `after`-th to be read in a process, and the later ones, do `fault()` instead."""

    def __init__(self, sequences, fault, after, everywhere=False):
        self.sequences, self.fault, self.after, self.parent = sequences, fault, after, 0 if everywhere else os.getpid()

    def __len__(self):
        return len(self.sequences)

    def __getitem__(self, index):
        self.after -= 1
        if self.after < 0 and os.getpid() != self.parent:
            self.fault()
        return self.sequences[index]

    def __getattr__(self, name):
        return getattr(self.sequences, name)


def saved_step(state):
    saved = read_newest_state(state.run_dir)
    return saved and saved["progress"]["step"]


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        pytest.param(fault, where, marks=[] if (fault, where) == ("killed", "loader") else [pytest.mark.slow])
        for fault in FAULTS
        for where in ("loader", "val_loader")
    ],
)
def test_failed_worker_is_named_and_the_last_step_is_saved(make_run, fault, where):
    does, says = FAULTS[fault]
    state = make_run("pretrain", *RUN, f"data.worker_timeout={2 if fault in STUCK else 60}")
    loader = state.loader if where == "loader" else state.val_loaders[""]
    loader.sequences = Faulty(loader.sequences, does, after=10 if where == "loader" else 1)
    with pytest.raises(TrainingError, match=says):
        train(state)
    assert state.progress.step >= 2 and saved_step(state) == state.progress.step
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_run_that_is_resumed_after_a_failed_worker_is_bitwise_equal(make_run):
    train(make_run("pretrain", *RUN, folder="whole"))
    state = make_run("pretrain", *RUN, folder="run")
    state.loader.sequences = Faulty(state.loader.sequences, FAULTS["killed"][0], after=10)
    with pytest.raises(TrainingError):
        train(state)
    resumed = make_run("pretrain", *RUN, folder="run", attempt=2)
    train(resumed)
    assert diff_run_dirs(state.run_dir.parent / "whole", resumed.run_dir) == []


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_stop_while_the_run_waits_for_data_saves_the_last_step(make_run, num_workers):
    state = make_run("pretrain", *RUN, f"data.num_workers={num_workers}", "data.worker_timeout=0")
    reading = threading.Event()

    def block():
        reading.set()
        os.read(os.pipe()[0], 1)

    state.loader.sequences = Faulty(state.loader.sequences, block, after=10, everywhere=True)
    with pytest.raises(Interrupted):
        train(state, lambda: state.progress.step >= 2 if num_workers else reading.is_set())
    assert state.progress.step >= 1 and saved_step(state) == state.progress.step


@pytest.mark.slow
def test_epoch_plan_that_takes_long_is_progress_of_its_worker(make_run, monkeypatch):
    """A worker that plans the packed sequences of the second epoch sends no batch meanwhile."""
    read, parent = packing.read_slices, os.getpid()

    def slow_slices(rows, progress):
        for _ in range(0 if os.getpid() == parent else 8):
            threading.Event().wait(0.3)
            progress(0, 0, 0)
        return read(rows, progress)

    monkeypatch.setattr(packing, "read_slices", slow_slices)
    state = make_run(
        "pretrain", "data.num_workers=1", "data.worker_timeout=1.5", "data.packing=best_fit", "train.epochs=2"
    )
    train(state)
    assert state.progress.step == state.total_steps
