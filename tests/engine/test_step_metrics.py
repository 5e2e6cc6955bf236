"""What steps find is read together, at log lines and before anything is saved or judged; between them nothing waits for the device."""

import itertools
import json
import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import Interrupted, TrainingError
from runner.checkpoint import manager
from runner.checkpoint.manager import newest_checkpoint
from runner.engine import loop, step_metrics
from runner.engine.loop import train
from runner.engine.step_metrics import Throughput
from runner.engine.verify_resume import diff_run_dirs

MOE = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32", "model.router_aux_loss_coef=0.01"]
# What needs the numbers of a tensor, or how many of them are of some kind, before Python can go on.
WAITING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount", "repeat_interleave"}


class Waits(TorchDispatchMode):
    """What in a step needs numbers, and after which steps they are read. Inside of the operators for the processor nothing is seen:
    a GPU has others."""

    def __init__(self, state, monkeypatch) -> None:
        super().__init__()
        self.run, self.in_a_step, self.below, self.inside, self.outside = state, False, False, set(), set()
        step, tolist = loop.train_step, torch.Tensor.tolist

        def stepped(*args):
            self.in_a_step = True
            found = step(*args)
            self.in_a_step = False
            return found

        def listed(tensor):
            self.note("tolist")  # on a processor no operator
            return tolist(tensor)

        monkeypatch.setattr(loop, "train_step", stepped)
        monkeypatch.setattr(torch.Tensor, "tolist", listed)

    def note(self, name: str) -> None:
        if not self.below:
            self.inside.add(name) if self.in_a_step else self.outside.add(self.run.progress.step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in WAITING or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            self.note(name)
        self.below, before = True, self.below
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.below = before


@pytest.mark.parametrize(
    "stage, words",
    [
        ("pretrain", ["data.packing=best_fit"]),
        ("pretrain", ["data.packing=best_fit", "optimizer=muon", "precision=bf16"]),
        ("pretrain", MOE),
        ("sft", ["precision=bf16"]),
        ("lora", ["optimizer=muon"]),
        ("dpo", []),
        ("dpo_lora", ["data.packing=best_fit"]),
    ],
)
def test_nobody_waits_for_the_device_between_two_log_lines(make_run, monkeypatch, stage, words):
    state = make_run(stage, *words, "train.log_every=3", "train.batch_size=1", "train.accumulation_steps=2", "train.max_steps=7")
    with Waits(state, monkeypatch) as waits:
        train(state)
    assert waits.outside == {3, 6, 7}
    # How many tokens an expert gets is read from the data: it says how large its products are. (The third is one_hot's, on a processor only.)
    assert waits.inside == ({"bincount", "tolist", "_local_scalar_dense"} if words == MOE else set())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", [[], ["data.packing=best_fit"], ["optimizer=muon"]], ids=["rows", "packed", "muon"])
def test_a_step_on_a_gpu_does_not_wait_for_it(make_run, words):
    state = make_run("pretrain", "device=cuda", "precision=bf16", *words)
    first, second = itertools.islice(state.loader.iter_epoch(0), 2)
    loop.train_step(state, first, 1e-3)  # what is done once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.train_step(state, second, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def poisoned(state, *steps):
    """The gradient of one parameter, in the middle of the model, is NaN whenever the run stands at one of `steps`."""
    middle = state.model.model.layers[1].self_attn.o_proj.weight
    middle.register_hook(lambda grad: grad * math.nan if state.progress.step in steps else grad)
    return state


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_looks_seldom_walks_as_one_that_looks_at_every_step(make_run, optimizer):
    words = ["train.max_steps=9", "train.batch_size=2", "model.dropout=0.1", f"optimizer={optimizer}", "train.save_every=4", "train.keep_checkpoints=9"]
    train(often := poisoned(make_run("pretrain", *words, folder="often"), 0, 2, 5, 6))
    train(seldom := poisoned(make_run("pretrain", *words, "train.log_every=7", folder="seldom"), 0, 2, 5, 6))
    assert often.progress == seldom.progress and often.progress.nonfinite_steps == 4
    for step in (4, 8, 9):
        one, other = (state.run_dir / "checkpoints" / f"step-{step:08d}" for state in (often, seldom))
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()
        states = [json.loads((folder / "state.json").read_text()) for folder in (one, other)]
        assert states[0]["progress"] == states[1]["progress"]
    assert (often.folder / "diagnosis.json").read_text() == (seldom.folder / "diagnosis.json").read_text()


def test_a_step_that_is_read_late_is_named_with_its_rows_and_its_first_parameter(make_run):
    state = poisoned(make_run("pretrain", "train.max_steps=7", "train.log_every=6"), 2)
    rows = [batches[0].names for batches in state.loader.iter_epoch(0)]
    train(state)
    found = json.loads((state.run_dir / "diagnosis.json").read_text())
    assert (found["step"], found["rows"], found["first_parameter"]) == (3, rows[2], "model.layers.1.self_attn.o_proj.weight")
    assert len(found["recent_losses"]) == 3 and found["loss"] is not None and found["grad_norm"] is None


def test_too_many_steps_that_are_not_finite_are_found_before_the_next_save(make_run):
    state = poisoned(make_run("pretrain", "train.max_nonfinite_steps=2", "train.log_every=8", "train.save_every=4"), 1, 4, 5)
    with pytest.raises(TrainingError, match=r"2 steps in a row .*step 6, rows"):
        train(state)
    assert state.progress.step == 8 and state.progress.nonfinite_steps == 3 and newest_checkpoint(state.run_dir).name == "step-00000004"
    assert not state.pending_steps


def test_what_waits_is_bounded_however_seldom_a_run_logs(make_run, monkeypatch):
    monkeypatch.setattr(step_metrics, "MAX_PENDING_STEPS", 3)
    state, waiting = make_run("pretrain", "train.batch_size=2", "train.log_every=1000", "train.max_steps=12"), []
    monkeypatch.setattr(Throughput, "add", lambda pace, positions: waiting.append(len(state.pending_steps)))
    train(state)
    assert waiting == [1, 2, 3] * 4


@pytest.mark.parametrize("cut", [1, 5])
def test_a_stop_between_two_readings_changes_no_bit(make_run, cut):
    words = ["train.max_steps=9", "train.log_every=3", "model.dropout=0.1"]
    train(poisoned(make_run("pretrain", *words, folder="whole"), 0, 3))
    for attempt in (1, 2):
        state = poisoned(make_run("pretrain", *words, folder="stopped", attempt=attempt), 0, 3)
        try:
            train(state, stop=lambda state=state, attempt=attempt: attempt == 1 and state.progress.step == cut)
        except Interrupted:
            torch.manual_seed(attempt)  # nothing left in this process may help the next
    assert diff_run_dirs(state.run_dir.parent / "whole", state.run_dir) == []


def test_time_in_which_the_device_was_busy_is_not_counted_as_waiting_for_data():
    for idle in (True, False):
        pace = Throughput(lambda idle=idle: idle)
        assert list(pace.waiting(iter([[], []]))) == [[], []]
        assert (pace.read()["data_wait"] > 0) == idle


def test_a_run_that_breaks_off_is_read_before_it_ends(make_run, monkeypatch):
    state = make_run("pretrain", "train.max_steps=9", "train.log_every=100", "train.max_nonfinite_steps=2")
    honest = loop.train_step

    def broken(state, batches, lr):
        if state.progress.step == 5:
            raise OSError("gone")
        if state.progress.step >= 2:
            next(state.model.parameters()).data.fill_(math.nan)
        return honest(state, batches, lr)

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(OSError, match="gone"):
        train(state)
    assert (state.progress.step, state.progress.nonfinite_steps) == (5, 2)  # the third is not read: two end a run
    assert json.loads((state.run_dir / "diagnosis.json").read_text())["step"] == 4


def test_a_run_that_fails_ends_when_its_save_has(make_run, monkeypatch):
    """A rank's process ends at once: nothing waits for threads there."""
    state = make_run("pretrain", "train.max_steps=9", "train.save_every=1")
    commit, honest = manager._write_checkpoint, loop.train_step

    def slow(*args):
        time.sleep(0.3)
        return commit(*args)

    def broken(state, batches, lr):
        if state.progress.step == 1:
            raise OSError("gone")
        return honest(state, batches, lr)

    monkeypatch.setattr(manager, "_write_checkpoint", slow)
    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(OSError, match="gone"):
        train(state)
    assert newest_checkpoint(state.run_dir).name == "step-00000001"
