"""A fault between two saves: exit code 1, the last completed step is saved, and the resumed run is bitwise equal to one
without the fault.
"""

from __future__ import annotations

import math
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainee import (
    TIMEOUT,
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

from common.errors import UserError, ignore_broken_pipe
from runner.checkpoint import manager
from runner.engine import evaluation, export, loop
from runner.engine.optim.groups import OptimizerGroup
from runner.engine.verify_resume import diff_run_dirs

# 15 examples: 8 steps of two micro-batches in an epoch; nothing is saved before the end
RUN = [
    "train.batch_size=1",
    "train.accumulation_steps=2",
    "train.save_every=100",
    "train.eval_every=5",
    "train.sample_every=6",
]
LAST = 16

Fault = Callable[[], object]


def fail(error: BaseException) -> None:
    raise error


def in_micro_batch(step: int, number: int, fault: Fault) -> None:
    """Call `fault` after the forward pass of a micro-batch, 1 or 2: it has drawn random numbers for dropout."""
    train_step, mask = loop.train_step, loop.mask_dummy_batch
    calls: list[int] = []

    def counted_step(state, *args):
        calls[:] = [state.progress.step + 1]
        return train_step(state, *args)

    def failing_mask(batch, sums):
        calls.append(0)
        if calls == [step, *[0] * number]:
            fault()
        return mask(batch, sums)

    loop.train_step, loop.mask_dummy_batch = counted_step, failing_mask


def in_call(owner: object, name: str, is_due: Callable[..., bool], fault: Fault) -> None:
    """Call `fault` before `owner.name` where `is_due` of its arguments."""
    function = getattr(owner, name)

    def failing(*args, **options):
        if is_due(*args):
            fault()
        return function(*args, **options)

    setattr(owner, name, failing)


def at(step: int) -> Callable[..., bool]:
    return lambda state, *args: state.progress.step == step


def truncate_store(cache: Path) -> None:
    """What a cleaner of temporary folders does to a token store that is open."""
    for file in cache.rglob("tokens.bin"):
        os.truncate(file, 0)


def break_optimizer() -> None:
    """Raise after half of the parameters are updated, in step 7."""
    step = OptimizerGroup.step
    calls = []

    def failing(group, found_inf):
        calls.append(1)
        if len(calls) == 7:
            with torch.no_grad():
                next(iter(group.names)).add_(1.0)
            raise MemoryError("in the optimizer")
        step(group, found_inf)

    OptimizerGroup.step = failing


def break_weight() -> None:
    """Put an infinity into a weight between two steps, as a fault of the memory does; then fail."""

    def lr_at(step, *args):
        if step == 6:
            states[0].model.model.embed_tokens.weight.data[6000] = math.inf
            raise RuntimeError("boom")
        return original(step, *args)

    original, states, start = loop.lr_at, [], loop.start_or_resume
    loop.start_or_resume = lambda state: (start(state), states.append(state))[0]
    loop.lr_at = lr_at


boom = RuntimeError("boom")
# fault, installed in the child -> (the step that is saved then, or why none is; text of the error in run.json)
FAULTS = {
    "forward pass": (lambda cache: in_micro_batch(7, 2, lambda: fail(boom)), 6, "boom"),
    "out of memory": (
        lambda cache: in_micro_batch(7, 1, lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))),
        6,
        "out of memory",
    ),
    "MemoryError": (lambda cache: in_micro_batch(7, 2, lambda: fail(MemoryError())), 6, "MemoryError"),
    "KeyboardInterrupt": (
        lambda cache: in_micro_batch(7, 2, lambda: fail(KeyboardInterrupt())),
        6,
        "KeyboardInterrupt",
    ),
    "sys.exit of a plugin": (lambda cache: in_micro_batch(7, 2, lambda: sys.exit(1)), 6, "SystemExit"),
    "schedule": (lambda cache: in_call(loop, "lr_at", lambda step, *args: step == 6, lambda: fail(boom)), 6, "boom"),
    "truncated store": (
        lambda cache: in_call(loop, "lr_at", lambda step, *args: step == 6, lambda: truncate_store(cache)),
        6,
        "of the token store",
    ),
    "evaluation": (lambda cache: in_call(evaluation, "evaluate_loss", at(10), lambda: fail(boom)), 10, "boom"),
    "evaluation metric": (
        lambda cache: in_call(evaluation, "finite_or_none", lambda loss: True, lambda: fail(boom)),
        5,
        "boom",
    ),
    "best weights": (
        lambda cache: in_call(
            manager.CheckpointManager, "save_best", lambda self, step, *args: step == 10, lambda: fail(boom)
        ),
        10,
        "boom",
    ),
    "samples": (lambda cache: in_call(evaluation, "generate", lambda *args: True, lambda: fail(boom)), 6, "boom"),
    "refused prompt": (
        lambda cache: in_call(
            evaluation, "generate", lambda *args: True, lambda: fail(UserError("too long", "a", "b"))
        ),
        6,
        "too long (a); b",
    ),
    "export": (lambda cache: in_call(export.save, "save_model", lambda *args: True, lambda: fail(boom)), LAST, "boom"),
    "half an update": (
        lambda cache: break_optimizer(),
        "step 6 cannot be saved, the update of the weights was not finished",
        "MemoryError: in the optimizer",
    ),
    "metrics": (
        lambda cache: in_call(loop, "log_step", lambda state, *args: state.progress.step == 7, lambda: fail(boom)),
        "step 7 cannot be saved, ",
        "boom",
    ),
    "weights": (
        lambda cache: break_weight(),
        "step 6 could not be saved, model.embed_tokens.weight contains values that are not finite",
        "boom",
    ),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """An uninterrupted run, and its cache."""
    with memory_dir(tmp_path_factory.mktemp("uninterrupted")) as root:
        assert train(make_config(root, *RUN), root / "run") == 0, read_output(root / "run")
        yield root


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_failure_saves_the_last_completed_step_and_resumes_bitwise_equal(fault, uninterrupted):
    install, step, message = FAULTS[fault]
    run_dir = uninterrupted / fault.replace(" ", "-")
    config = make_config(uninterrupted, *RUN)
    code = train(config, run_dir, lambda: install(uninterrupted / "cache"))
    assert code == (130 if fault == "KeyboardInterrupt" else 1), read_output(run_dir)
    saved, fields = saved_steps(run_dir), read_run_json(run_dir)
    assert fields["status"] == "failed" and message in fields["error"], fields["error"]
    log = (run_dir / "train.log").read_text()
    if isinstance(step, int):
        # batches that were read before are still trained on
        assert saved[-1] == step or (fault == "truncated store" and step < saved[-1] < LAST)
        assert (fields["checkpoint"], fields["step"]) == (f"step-{saved[-1]:08d}", saved[-1])
        assert f"step {saved[-1]} is saved; continue with: " in log
    else:
        assert saved == [] and step in log
    assert train(config, run_dir) == 0, read_output(run_dir)
    assert diff_run_dirs(uninterrupted / "run", run_dir) == [] and not temp_files(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("console", ["plain", "rich"])
def test_closed_terminal_saves_and_resumes_bitwise_equal(console, uninterrupted):
    """SIGHUP, and EIO for every write."""
    master, slave = pty.openpty()
    name = os.ttyname(slave)

    def train_on_terminal() -> None:
        os.close(master), os.close(slave)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test suite under nohup passes on that it is ignored
        terminal = os.open(name, os.O_RDWR)  # of a new session: its controlling terminal
        os.dup2(terminal, 1), os.dup2(terminal, 2)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)
        ignore_broken_pipe()
        in_call(loop, "train_step", at(3), wait_until_closed)

    def wait_until_closed() -> None:
        deadline = time.monotonic() + TIMEOUT
        while not closed.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    run_dir, closed = uninterrupted / console, uninterrupted / f"{console}-closed"
    config = make_config(uninterrupted, *RUN, f"tracker.console={console}")
    child = launch(config, run_dir, train_on_terminal)
    shown = b""
    while b"3/16" not in shown:
        assert select.select([master], [], [], TIMEOUT)[0], read_output(run_dir)
        shown += os.read(master, 4096)
    os.close(slave)  # not before: a terminal that no process has open cannot be read
    os.close(master)
    closed.touch()
    assert wait_for_exit(child) == 75
    assert 3 <= saved_steps(run_dir)[-1] < LAST and read_run_json(run_dir)["status"] == "interrupted"
    assert train(make_config(uninterrupted, *RUN), run_dir) == 0
    differences = diff_run_dirs(uninterrupted / "run", run_dir)
    # rich draws from Python's generator, which training does not use
    assert differences == [] or (console == "rich" and differences == ["state.json: rng"])
