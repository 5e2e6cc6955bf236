"""Results of steps are fetched together, when they are logged and before a save or an evaluation; in between the host
does not wait for the device.
"""

import json
import math
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import DivergedError, Interrupted
from runner.checkpoint import atomic_dir
from runner.checkpoint.manager import newest_checkpoint
from runner.engine import loop, step_metrics
from runner.engine.device import precision
from runner.engine.loop import check_converged, train
from runner.engine.step_metrics import Throughput
from runner.engine.verify_resume import diff_run_dirs

MOE = [
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
    "model.router_aux_loss_coef=0.01",
]
# Operators whose result, or its shape, Python needs as a number: a host sync on a GPU
SYNCING = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
    "repeat_interleave",
}


class HostSyncs(TorchDispatchMode):
    """Records host syncs: names of the operators inside of steps, and after which steps there were others.

    Operators that others call do not count.
    """

    def __init__(self, state, monkeypatch) -> None:
        super().__init__()
        self.state, self.in_step, self.is_nested, self.inside, self.after_steps = state, False, False, set(), set()
        step, tolist = loop.train_step, torch.Tensor.tolist

        def recorded_step(*args):
            self.in_step = True
            output = step(*args)
            self.in_step = False
            return output

        def recorded_tolist(tensor):
            self.record("tolist")  # on a CPU it calls no operator
            return tolist(tensor)

        monkeypatch.setattr(loop, "train_step", recorded_step)
        monkeypatch.setattr(torch.Tensor, "tolist", recorded_tolist)

    def record(self, name: str) -> None:
        if not self.is_nested:
            self.inside.add(name) if self.in_step else self.after_steps.add(self.state.progress.step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in SYNCING or (name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
            self.record(name)
        self.is_nested, before = True, self.is_nested
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_nested = before


@pytest.mark.parametrize(
    "stage, overrides",
    [
        ("pretrain", ["data.packing=best_fit", "optimizer=muon", "precision=bf16"]),
        pytest.param("pretrain", MOE, marks=pytest.mark.slow),
        pytest.param("sft", ["precision=bf16"], marks=pytest.mark.slow),
        pytest.param("lora", ["optimizer=muon"], marks=pytest.mark.slow),
        pytest.param("dpo", [], marks=pytest.mark.slow),
        pytest.param("dpo_lora", ["data.packing=best_fit"], marks=pytest.mark.slow),
    ],
    ids=["packed-muon-bf16", "moe", "sft-bf16", "lora-muon", "dpo", "packed-dpo_lora"],
)
def test_step_has_no_host_sync_between_two_log_lines(make_run, monkeypatch, stage, overrides):
    state = make_run(
        stage, *overrides, "train.log_every=3", "train.batch_size=1", "train.accumulation_steps=2", "train.max_steps=7"
    )
    monkeypatch.setattr(precision, "exceeds", lambda norm, clip: True)  # read on a CPU only
    with HostSyncs(state, monkeypatch) as syncs:
        train(state)
    assert syncs.after_steps == {3, 6, 7}
    # The number of tokens per expert determines shapes. one_hot calls _local_scalar_dense on a CPU only.
    assert syncs.inside == ({"bincount", "tolist", "_local_scalar_dense"} if overrides == MOE else set())


def with_nonfinite_gradient(state, *steps):
    """Make the gradient of one parameter NaN in the steps that follow step numbers `steps`."""
    weight = state.model.model.layers[1].self_attn.o_proj.weight
    weight.register_hook(lambda grad: grad * math.nan if state.progress.step in steps else grad)
    return state


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_nonfinite_step_changes_no_weight_and_names_its_rows(make_run, logged, precision):
    state, weights = (
        with_nonfinite_gradient(make_run("pretrain", f"precision={precision}", "train.max_steps=3"), 1, 2),
        [],
    )
    log = state.logger.log
    state.logger.log = lambda kind, step, **metrics: (
        weights.append([p.detach().clone() for p in state.model.parameters()]),
        log(kind, step, **metrics),
    )
    train(state)
    assert all(torch.equal(p, q) for later in weights[1:] for p, q in zip(weights[0], later, strict=True))
    records = logged(state.run_dir)
    assert (
        records[1]["grad_norm"] is None and "grad_norm" in records[1]["nonfinite"] and records[2]["skipped_steps"] == 2
    )
    rows = next(state.loader.iter_epoch(0, skip=2))[0].names
    assert all(name in (state.run_dir / "train.log").read_text() for name in rows)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_flush_interval_does_not_change_weights_or_progress(make_run, optimizer):
    overrides = [
        "train.max_steps=9",
        "train.batch_size=2",
        "model.dropout=0.1",
        f"optimizer={optimizer}",
        "train.save_every=4",
        "train.keep_checkpoints=9",
    ]
    train(often := with_nonfinite_gradient(make_run("pretrain", *overrides, folder="often"), 0, 2, 5, 6))
    train(
        seldom := with_nonfinite_gradient(
            make_run("pretrain", *overrides, "train.log_every=7", folder="seldom"), 0, 2, 5, 6
        )
    )
    assert often.progress == seldom.progress and often.progress.nonfinite_steps == 4
    for step in (4, 8, 9):
        one, other = (state.run_dir / "checkpoints" / f"step-{step:08d}" for state in (often, seldom))
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()
        states = [json.loads((folder / "state.json").read_text()) for folder in (one, other)]
        assert states[0]["progress"] == states[1]["progress"]
    assert (often.run_dir / "diagnosis.json").read_text() == (seldom.run_dir / "diagnosis.json").read_text()


def test_diagnosis_names_rows_and_first_parameter_of_a_step_fetched_late(make_run):
    state = with_nonfinite_gradient(make_run("pretrain", "train.max_steps=7", "train.log_every=6"), 2)
    rows = [batches[0].names for batches in state.loader.iter_epoch(0)]
    train(state)
    diagnosis = json.loads((state.run_dir / "diagnosis.json").read_text())
    assert (diagnosis["step"], diagnosis["rows"], diagnosis["first_parameter"]) == (
        3,
        rows[2],
        "model.layers.1.self_attn.o_proj.weight",
    )
    assert len(diagnosis["recent_losses"]) == 3 and diagnosis["loss"] is not None and diagnosis["grad_norm"] is None


@pytest.mark.slow
def test_nonfinite_steps_end_the_run_before_the_next_save(make_run):
    state = with_nonfinite_gradient(
        make_run("pretrain", "train.max_nonfinite_steps=2", "train.log_every=8", "train.save_every=4"), 1, 4, 5
    )
    with pytest.raises(DivergedError, match=r"2 consecutive steps .*step 6, rows"):
        train(state)
    assert (
        state.progress.step == 8
        and state.progress.nonfinite_steps == 3
        and newest_checkpoint(state.run_dir).name == "step-00000004"
    )
    assert not state.pending_steps


def test_run_near_the_uniform_loss_has_diverged_only_without_gradients(make_run):
    run = make_run("pretrain")
    uniform = run.objective.uniform_loss(run.cfg.model.vocab_size)
    for zero_steps, loss in ((0, uniform), (1, uniform), (99, 0.5 * uniform), (99, None)):
        run.progress.zero_gradient_steps = zero_steps
        check_converged(run, loss)
    run.progress.zero_gradient_steps = 2
    with pytest.raises(
        DivergedError, match="the gradients of the last 2 steps are exactly 0; use a smaller optimizer.lr"
    ):
        check_converged(run, uniform)
    run.progress.zero_gradient_steps = 0
    with pytest.raises(DivergedError, match="the final loss is"):
        check_converged(run, 3 * uniform)


@pytest.mark.slow
def test_flush_happens_at_the_latest_after_max_pending_steps(make_run, monkeypatch):
    monkeypatch.setattr(step_metrics, "MAX_PENDING_STEPS", 3)
    state, pending = make_run("pretrain", "train.batch_size=2", "train.log_every=1000", "train.max_steps=12"), []
    monkeypatch.setattr(Throughput, "count", lambda throughput, tokens: pending.append(len(state.pending_steps)))
    train(state)
    assert pending == [1, 2, 3] * 4


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_resume_between_two_flushes_is_bitwise_equal(make_run, stop):
    overrides = ["train.max_steps=9", "train.log_every=3", "model.dropout=0.1"]
    train(with_nonfinite_gradient(make_run("pretrain", *overrides, folder="uninterrupted"), 0, 3))
    for attempt in (1, 2):
        state = with_nonfinite_gradient(make_run("pretrain", *overrides, folder="stopped", attempt=attempt), 0, 3)
        try:
            train(
                state, stop_requested=lambda state=state, attempt=attempt: attempt == 1 and state.progress.step == stop
            )
        except Interrupted:
            torch.manual_seed(attempt)  # the next attempt must not depend on this process's random state
    assert diff_run_dirs(state.run_dir.parent / "uninterrupted", state.run_dir) == []


@pytest.mark.parametrize("is_idle", [True, False])
def test_throughput_counts_waiting_for_data_only_while_the_device_is_idle(is_idle):
    throughput = Throughput(lambda: is_idle)
    assert list(throughput.timed(iter([[], []]))) == [[], []]
    assert (throughput.read()["data_wait"] > 0) == is_idle


def test_pending_steps_are_fetched_if_training_fails(make_run, monkeypatch):
    state = make_run("pretrain", "train.max_steps=9", "train.log_every=100", "train.max_nonfinite_steps=2")
    original = loop.train_step

    def failing(state, batches, lr):
        if state.progress.step == 5:
            raise OSError("gone")
        if state.progress.step >= 2:
            next(state.model.parameters()).data.fill_(math.nan)
        return original(state, batches, lr)

    monkeypatch.setattr(loop, "train_step", failing)
    with pytest.raises(OSError, match="gone"):
        train(state)
    # the second one raises, so the third is not counted
    assert (state.progress.step, state.progress.nonfinite_steps) == (5, 2)
    assert json.loads((state.run_dir / "diagnosis.json").read_text())["step"] == 4


def test_save_in_flight_is_finished_if_training_fails(make_run, monkeypatch):
    """The process of a rank ends without waiting for its threads."""
    state = make_run("pretrain", "train.max_steps=9", "train.save_every=1")
    write, original = atomic_dir.write_atomic_dir, loop.train_step

    def slow_write(*args, **options):
        time.sleep(0.3)
        return write(*args, **options)

    def failing(state, batches, lr):
        if state.progress.step == 1:
            raise OSError("gone")
        return original(state, batches, lr)

    monkeypatch.setattr(atomic_dir, "write_atomic_dir", slow_write)
    monkeypatch.setattr(loop, "train_step", failing)
    with pytest.raises(OSError, match="gone"):
        train(state)
    assert newest_checkpoint(state.run_dir).name == "step-00000001"


def test_run_whose_gradients_vanish_ends_as_diverged(make_run):
    state = make_run("pretrain", "train.max_steps=3")
    original, uniform = state.objective.loss, state.objective.uniform_loss(state.cfg.model.vocab_size)

    def loss(model, batch):
        loss = original(model, batch)["loss"]
        return {"loss": loss if state.progress.step < 1 else loss * 0 + uniform * state.objective.count(batch)}

    state.objective.loss = loss
    with pytest.raises(DivergedError, match="the gradients of the last 2 steps are exactly 0"):
        train(state)


def test_recent_losses_are_those_of_the_last_steps(make_run, monkeypatch, logged):
    monkeypatch.setattr(step_metrics, "RECENT_LOSSES", 2)
    train(state := make_run("pretrain", "train.max_steps=4"))
    assert state.progress.recent_losses == [record["loss"] for record in logged(state.run_dir)][-2:]


def test_skipped_steps_are_counted_over_the_whole_run(make_run, logged):
    state = with_nonfinite_gradient(make_run("pretrain", "train.max_steps=5"), 1, 3)
    train(state)
    assert [record.get("skipped_steps") for record in logged(state.run_dir)] == [None, 1, 1, 2, 2]
