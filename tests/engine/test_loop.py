import json
import math
import multiprocessing

import pytest
import torch

from common.errors import Interrupted, TrainingError
from runner.engine.evaluation import evaluate_loss
from runner.engine.loop import step_with_retries, train, train_step
from runner.engine.optim.schedules import lr_at
from runner.engine.step_output import fetch_results

STAGES = ["pretrain", "sft", "lora", "dpo", "dpo_lora"]
PACKED = ["data.packing=best_fit"]
MOE = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32", "model.router_aux_loss_coef=0.01"]


def weights(state):
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param([], id="dense"),
        pytest.param(MOE, id="moe", marks=pytest.mark.slow),
        pytest.param(PACKED, id="packed", marks=pytest.mark.slow),
        pytest.param(MOE + PACKED, id="packed moe"),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation_changes_nothing_but_memory(make_run, stage, extra):
    """36 ragged rows in steps of 8: five AdamW steps, the last of them short. Packed: what 60 rows fill, in steps of 8 windows."""
    results = []
    for batch_size, accumulation_steps in ((8, 1), (4, 2), (2, 4)):
        words = [f"train.batch_size={batch_size}", f"train.accumulation_steps={accumulation_steps}", *extra]
        state = make_run(stage, *words, folder=f"{batch_size}", rows=60 if PACKED[0] in extra else 36)
        train(state)
        assert len(state.pipeline.train) % 8 and state.progress.step == -(-len(state.pipeline.train) // 8) >= 3
        results.append(weights(state))
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_the_first_loss_is_that_of_a_guess(make_run, stage):
    state = make_run(stage)
    (result,) = fetch_results(state.dist, [train_step(state, next(state.loader.iter_epoch(0)), lr=1e-9)])
    assert result.means["loss"] == pytest.approx(math.log(state.cfg.model.vocab_size), rel=0.02)


@pytest.mark.parametrize("stage", ["dpo", "dpo_lora"])
def test_dpo_starts_from_its_reference_at_ln_2(make_run, stage):
    state = make_run(stage)
    (result,) = fetch_results(state.dist, [train_step(state, next(state.loader.iter_epoch(0)), lr=1e-9)])
    assert result.means["loss"] == pytest.approx(math.log(2), abs=1e-6) and result.means["reward_margin"] == 0


@pytest.mark.parametrize("stage, rows", [("pretrain", 1), ("sft", 4), ("dpo", 4)])
def test_a_batch_is_learned_by_heart(make_run, stage, rows):
    """One row for pretraining: nothing before its first word tells four of them apart."""
    state = make_run(stage, "train.max_steps=150", "optimizer.lr=1e-2", "schedule=constant", rows=rows)
    train(state)
    assert state.progress.recent_losses[-1] < 0.05


@pytest.mark.parametrize("workers", [0, 1])
def test_tokens_that_rot_while_a_run_reads_them_fail_it(make_run, workers):
    state = make_run("pretrain", f"data.num_workers={workers}")
    (tokens,) = (state.run_dir.parent / "cache").glob("*/tokens.bin")
    tokens.write_bytes(bytes(b ^ 1 for b in tokens.read_bytes()))
    with pytest.raises(TrainingError, match="damaged"):
        train(state)
    assert multiprocessing.active_children() == []


def test_a_run_that_fails_leaves_no_data_worker_behind_to_be_waited_for(make_run):
    """They hear no signal: the program would not end."""
    state = make_run("pretrain", "data.num_workers=2", "train.max_nonfinite_steps=1")
    with torch.no_grad():
        state.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="not finite") as failed:
        train(state)
    assert failed.traceback and multiprocessing.active_children() == []


def test_an_evaluation_that_breaks_leaves_no_data_worker_behind(make_run):
    state = make_run("pretrain", "data.num_workers=1", "data.val_fraction=0.3")
    state.objective.count = lambda batch: 1 // 0
    with pytest.raises(ZeroDivisionError) as failed:
        evaluate_loss(state)
    assert failed.traceback and multiprocessing.active_children() == []


def test_a_run_that_ends_far_worse_than_guessing_has_failed(make_run):
    state = make_run("pretrain", "optimizer.lr=5", "train.max_steps=8", "schedule=constant")
    with pytest.raises(TrainingError, match="diverged: the loss ends at"):
        train(state)
    assert not (state.run_dir / "model").exists()


@pytest.mark.parametrize("stage", ["lora", "dpo_lora"])
def test_under_lora_only_adapters_move(make_run, stage):
    state = make_run(stage)
    before = weights(state)
    train(state)
    moved = {name for name, weight in weights(state).items() if not torch.equal(weight, before[name])}
    assert moved and all("lora" in name for name in moved)


def test_the_loss_in_the_log_is_the_loss_that_was_differentiated(make_run, logged):
    state = make_run("sft", "train.batch_size=2", "train.accumulation_steps=4")
    batches = next(state.loader.iter_epoch(0))
    with torch.no_grad():
        whole = sum(state.objective.loss(state.model, batch)["loss"] for batch in batches) / sum(batch.num_supervised_tokens for batch in batches)
    train(state)
    assert logged(state.run_dir)[0]["loss"] == pytest.approx(whole.item(), rel=1e-5)


def test_the_logged_rate_is_the_schedule_s_and_does_not_depend_on_accumulation(make_run, logged):
    state = make_run("pretrain", "train.batch_size=1", "train.accumulation_steps=4")
    train(state)
    assert [line["lr"] for line in logged(state.run_dir)] == [lr_at(step, state.total_steps, 1e-3, state.cfg.schedule) for step in range(state.total_steps)]


@pytest.mark.parametrize(
    "words", [["train.eval_every=1", "data.val_fraction=0.1"], ["train.sample_every=1", "train.sample_prompts=[goats]"]], ids=["evaluating", "sampling"]
)
def test_looking_at_a_run_does_not_change_it(make_run, words):
    share = [word for word in words if "val_fraction" in word]
    train(plain := make_run("pretrain", "model.dropout=0.1", *share, folder="plain"))
    train(watched := make_run("pretrain", "model.dropout=0.1", *words, folder="watched"))
    assert_equal(weights(plain), weights(watched))


def test_held_out_rows_are_never_trained_on(make_run):
    state = make_run("pretrain", "data.val_fraction=0.25")
    learned = {name for batches in state.loader.iter_epoch(0) for batch in batches for name in batch.names}
    judged = {name for batches in state.val_loader.iter_epoch(0) for batch in batches for name in batch.names}
    assert len(learned) == 27 and len(judged) == 9 and not learned & judged


def test_evaluation_weighs_every_token_alike_however_rows_are_batched(make_run):
    losses = [evaluate_loss(make_run("sft", "data.val_fraction=0.5", f"train.batch_size={size}", folder=str(size)))["loss"] for size in (1, 3, 18)]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def poisoned(state, steps):
    """Make the loss NaN whenever the run stands at one of `steps`."""
    honest = state.objective.loss

    def loss(model, batch):
        sums = honest(model, batch)
        return {**sums, "loss": sums["loss"] * math.nan} if state.progress.step in steps else sums

    state.objective.loss = loss
    return state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_moves_no_weight_and_its_rows_are_named(make_run, logged, precision):
    state = poisoned(make_run("pretrain", f"precision={precision}", "train.max_steps=3"), steps={1, 2})
    state.cfg.train.max_nonfinite_steps = 3
    states = []
    settled = state.logger.log
    state.logger.log = lambda kind, step, **numbers: (states.append(weights(state)), settled(kind, step, **numbers))
    train(state)
    assert_equal(states[0], states[1])
    assert_equal(states[0], states[2])
    lines = logged(state.run_dir)
    assert lines[1]["loss"] is None and "loss" in lines[1]["nonfinite"] and lines[2]["skipped_steps"] == 2
    log = (state.run_dir / "train.log").read_text()
    rows = next(state.loader.iter_epoch(0, skip=2))[0].names
    assert all(name in log for name in rows)
    found = json.loads((state.run_dir / "diagnosis.json").read_text())
    assert found["step"] == 3 and found["rows"] == rows and found["loss"] is None and found["first_parameter"] == "model.embed_tokens.weight"


def test_too_many_such_steps_in_a_row_fail_the_run(make_run):
    state = poisoned(make_run("pretrain", "train.max_nonfinite_steps=2"), steps={1, 3, 4})
    with pytest.raises(TrainingError, match="2 steps in a row"):
        train(state)
    assert state.progress.step == 5 and state.progress.nonfinite_steps == 3


def test_fp16_tries_an_overflowing_step_again_with_a_smaller_scale(make_run, logged):
    state = make_run("pretrain", "precision=fp16", "train.max_steps=3")
    state.precision.load_state_dict(state.precision.state_dict() | {"scale": 2.0**40})
    train(state)
    lines = logged(state.run_dir)
    assert [line["step"] for line in lines] == [1, 2, 3] and state.progress.overflows > 0
    assert lines[-1]["overflows"] == state.progress.overflows and lines[-1]["scale"] == 2.0 ** (40 - state.progress.overflows)
    assert all(torch.isfinite(weight).all() for weight in weights(state).values())


def test_fp16_that_overflows_at_any_scale_stops_with_advice(make_run):
    state = poisoned(make_run("pretrain", "precision=fp16"), steps={1})
    with pytest.raises(TrainingError, match="precision=bf16"):
        train(state)
    assert state.precision.loss_scale > 0
    assert all(torch.isfinite(weight).all() for weight in weights(state).values())


def test_fp16_scales_down_for_a_loss_that_overflows_though_its_gradients_do_not(make_run):
    state = make_run("pretrain", "precision=fp16")
    honest = state.objective.loss
    state.objective.loss = lambda model, batch: {"loss": honest(model, batch)["loss"] + (math.inf if state.precision.loss_scale > 2.0**10 else 0.0)}
    step_with_retries(state, next(state.loader.iter_epoch(0)), 1e-3, stop=lambda: False)
    assert state.precision.loss_scale == 2.0**10 and state.progress.step == 1 and state.progress.overflows == 6


def test_a_wish_to_stop_is_heard_between_two_tries_of_a_step(make_run):
    state = poisoned(make_run("pretrain", "precision=fp16"), steps={0})
    with pytest.raises(Interrupted):
        train(state, stop=lambda: state.progress.overflows == 2)
    assert state.progress.step == 0


@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_precision_is_what_the_matrices_are_multiplied_in(make_run, name, dtype):
    state, seen = make_run("pretrain", f"precision={name}"), set()
    state.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    train_step(state, next(state.loader.iter_epoch(0)), lr=1e-3)
    assert seen == {dtype} and all(p.dtype == torch.float32 for p in state.model.parameters())


@pytest.mark.parametrize("stage", ["sft", "dpo_lora"])
@pytest.mark.parametrize("again", ["true", "selective"])
def test_what_is_made_again_in_the_backward_pass_changes_no_bit(make_run, logged, stage, again):
    words = ["precision=bf16", "data.packing=best_fit", "model.dropout=0.1", "train.max_steps=3"]
    plain = make_run(stage, *words, "train.activation_checkpointing=false", folder="plain")
    train(plain)
    switched = make_run(stage, *words, f"train.activation_checkpointing={again}", folder="switched")
    assert switched.model.activation_checkpointing == ("full" if again == "true" else again)
    train(switched)
    assert [line["loss"] for line in logged(plain.folder)] == [line["loss"] for line in logged(switched.run_dir)]
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), switched.model.parameters(), strict=True))


@pytest.mark.slow
def test_compiled_layers_change_no_loss_beyond_rounding(make_run, logged):
    plain, switched = make_run("sft", folder="plain"), make_run("sft", "train.compile=default", folder="switched")
    train(plain)
    train(switched)
    for mine, theirs in zip(logged(plain.folder), logged(switched.run_dir), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


def test_patience_ends_a_run_that_no_longer_improves(make_run, logged):
    state = make_run("pretrain", "train.max_steps=60", "train.eval_every=1", "train.patience=3", "data.val_fraction=0.1", "optimizer.lr=0.3", "schedule=constant")
    train(state)
    assert state.stopped_early and state.progress.step < 60
    assert state.progress.step == state.progress.best_step + 3
    assert logged(state.run_dir, "eval")[-1]["step"] == state.progress.step


def test_asked_to_stop_a_run_saves_the_step_it_is_in(make_run):
    state = make_run("pretrain")
    with pytest.raises(Interrupted):
        train(state, stop=lambda: state.progress.step == 3)
    assert (state.run_dir / "checkpoints" / "step-00000003" / "MANIFEST.json").exists()


def test_the_router_is_taught_by_the_language_model_loss(make_run):
    state = make_run("pretrain", *MOE[:1], "model.num_experts_per_tok=1", "model.moe_intermediate_size=32", "model.router_aux_loss_coef=0")
    batch = next(state.loader.iter_epoch(0))[0]
    state.objective.loss(state.model.train(), batch)["loss"].backward()
    assert max(p.grad.abs().max() for name, p in state.model.named_parameters() if name.endswith("mlp.gate.weight")) > 1e-4
