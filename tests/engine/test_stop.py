"""A stop signal in the middle of an evaluation, of sampling or of a step: nothing more of it runs, and the resumed run
has the same bits.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import Interrupted, PeerLostError, StopRequested, resume_command
from common.file_lock import FileLock
from models.generate import Sampler
from runner.checkpoint.manager import newest_checkpoint
from runner.engine.device.signals import StopFlag
from runner.engine.loop import save_before_failure, train
from runner.engine.verify_resume import diff_run_dirs

ROOT = Path(__file__).parents[2]
HOLD_LOCK = """
import sys, time; sys.path.insert(0, {root!r})
from pathlib import Path
from common.file_lock import FileLock
lock = FileLock.acquire(Path({path!r}))
print("locked", flush=True)
time.sleep(60)
"""
RUN = [  # 18 rows and 6 for validation: six steps of three micro-batches, evaluations of six batches
    "train.batch_size=1", "train.accumulation_steps=3", "train.save_every=2", "train.eval_every=2", "train.sample_every=2", "data.val_fraction=0.25",
    "train.sample_prompts=[goats]", "train.sample_tokens=8", "model.dropout=0.1",
]  # fmt: skip


def signal_in(monkeypatch, state, phase, nth):
    """Send SIGTERM to this process in the `nth` call of `phase` (evaluation, step: batches; sampling: tokens); return
    the calls so far, as a list.
    """
    calls = []
    owner, name = (Sampler, "__call__") if phase == "sampling" else (type(state.objective), "loss")
    function = getattr(owner, name)

    def counted(*args):
        result = function(*args)
        if phase == "sampling" or state.model.training == (phase == "step"):
            calls.append(phase)
            if len(calls) == nth:
                os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(
    "phase, nth, step",
    [
        pytest.param("evaluation", 2, 2, id="first evaluation"),
        pytest.param("evaluation", 15, 6, id="last evaluation", marks=pytest.mark.slow),
        pytest.param("sampling", 3, 2, id="sampling", marks=pytest.mark.slow),
        pytest.param("step", 5, 1, id="micro-batch", marks=pytest.mark.slow),
    ],
)
def test_stop_inside_a_phase_abandons_it_and_resumes_bitwise_equal(make_run, monkeypatch, phase, nth, step):
    train(make_run("sft", *RUN, folder="uninterrupted", rows=24))
    state = make_run("sft", *RUN, folder="stopped", rows=24)
    with monkeypatch.context() as patch, StopFlag() as stop:
        calls = signal_in(patch, state, phase, nth)
        with pytest.raises(Interrupted, match=f"stopped after step {step}, saved"):
            train(state, stop)
    assert len(calls) == nth
    state.logger.finish("interrupted")
    torch.manual_seed(7)  # the resumed run must not depend on this process's random state
    resumed = make_run("sft", *RUN, folder="stopped", rows=24, attempt=2)
    train(resumed)
    assert diff_run_dirs(state.run_dir.with_name("uninterrupted"), state.run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stop_of_one_rank_abandons_the_same_batch_on_all(tmp_path, overrides_for, run_ranks, strategy):
    overrides = overrides_for("sft", *RUN, f"distributed={strategy}", rows=24)
    plans = {
        "evaluation": {"rank": 1, "is_training": False, "nth": 2},
        "step": {"rank": 1, "is_training": True, "nth": 5},
    }
    stopped = [
        {"folder": str(tmp_path / name), "overrides": overrides, "stop_in": plan} for name, plan in plans.items()
    ]
    run_ranks(2, [{"folder": str(tmp_path / "uninterrupted"), "overrides": overrides}, *stopped])
    run_ranks(2, [{"folder": str(tmp_path / name), "overrides": overrides, "attempt": 2} for name in plans])
    for name in plans:
        assert diff_run_dirs(tmp_path / "uninterrupted", tmp_path / name) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stop_in_the_export_needs_no_other_rank(tmp_path, overrides_for, run_ranks, strategy):
    training = {
        "folder": str(tmp_path / "run"),
        "overrides": overrides_for("sft", *RUN, "train.save_every=0", f"distributed={strategy}", rows=24),
    }
    run_ranks(2, [training | {"stop_in_export": True}])
    assert newest_checkpoint(tmp_path / "run").name == "step-00000003" and not (tmp_path / "run" / "model").exists()
    run_ranks(2, [training | {"attempt": 2}])
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_failure_of_one_rank_between_steps_is_saved_by_all(tmp_path, overrides_for, run_ranks):
    overrides = overrides_for("sft", *RUN, "train.save_every=0", "distributed=ddp", rows=24)
    plans = {"data": {"rank": 1, "where": "data"}, "evaluation": {"rank": 1, "where": "evaluation"}}
    failing = [
        {"folder": str(tmp_path / name), "overrides": overrides, "fail_on": plan} for name, plan in plans.items()
    ]
    run_ranks(2, [{"folder": str(tmp_path / "uninterrupted"), "overrides": overrides}, *failing])
    assert [newest_checkpoint(tmp_path / name).name for name in plans] == ["step-00000002", "step-00000002"]
    run_ranks(2, [{"folder": str(tmp_path / name), "overrides": overrides, "attempt": 2} for name in plans])
    for name in plans:
        assert diff_run_dirs(tmp_path / "uninterrupted", tmp_path / name) == [], name


@pytest.mark.parametrize(
    ("saved_step", "says"),
    [
        (20, "the step after 20 is lost; continue with: "),
        (10, "step 20 cannot be saved, the other ranks wait in the step; "),
    ],
)
def test_lost_peer_leaves_the_step_that_is_saved_already(saved_step, says, tmp_path):
    warnings = []
    state = SimpleNamespace(
        follow_run_dir=lambda: None,
        dist=SimpleNamespace(size=2),
        has_joined=False,
        is_consistent=True,
        first_step=0,
        run_dir=tmp_path,
    )
    state.progress, state.checkpoints, state.logger = (
        SimpleNamespace(step=20),
        SimpleNamespace(saved_step=saved_step),
        SimpleNamespace(warning=warnings.append),
    )
    save_before_failure(state, PeerLostError("another rank does not answer"))
    (warning,) = warnings
    assert warning.startswith(says) and resume_command(tmp_path) in warning


def test_stop_ends_a_wait_for_the_lock_of_a_cache(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK.format(root=str(ROOT), path=str(tmp_path / "store.lock"))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with StopFlag() as stop, pytest.raises(StopRequested), stop.interrupting("before the first step"):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            FileLock.acquire(tmp_path / "store.lock", wait=True)
    finally:
        holder.kill()
        holder.wait()
