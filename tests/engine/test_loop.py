"""The training loop: accumulation, losses, evaluation, early stopping, failures, activation checkpointing."""

import json
import math
import multiprocessing

import pytest
import torch
from engine_fixtures import registered_combinations
from fault_counts import only_full

from common.errors import DivergedError, Interrupted, TrainingError, UserError
from runner.engine.evaluation import evaluate_loss
from runner.engine.loop import step_with_retries, train, train_step
from runner.engine.optim.schedules import lr_at
from runner.engine.step_metrics import fetch_results

PACKED = ["data.packing=best_fit"]
MOE = [
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
    "model.router_aux_loss_coef=0.01",
]


def weights(state):
    return {name: p.detach().clone() for name, p in state.model.named_parameters()}


def differing(weights, others):
    assert weights.keys() == others.keys()
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def first_step(state):
    (result,) = fetch_results(state, [train_step(state, next(state.loader.iter_epoch(0)), lr=1e-9)])
    return result


def assert_accumulation_changes_no_update(make_run, stage, *overrides, rows=36, max_steps=0, atol=2e-5):
    """8 x 1 = 4 x 2 = 2 x 4 rows per step, the last step of the epoch shorter."""
    results = []
    for batch_size, accumulation_steps in ((8, 1), (4, 2), (2, 4)):
        split = [
            f"train.batch_size={batch_size}",
            f"train.accumulation_steps={accumulation_steps}",
            f"train.max_steps={max_steps}",
        ]
        state = make_run(stage, *split, *overrides, folder=f"batch{batch_size}", rows=rows)
        train(state)
        assert (
            len(state.pipeline.train) % 8
            and state.progress.step == (max_steps or -(-len(state.pipeline.train) // 8)) >= 3
        )
        results.append(weights(state))
    for other in results[1:]:
        for name, weight in results[0].items():
            torch.testing.assert_close(
                other[name], weight, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], MOE, PACKED, MOE + PACKED], ids=["dense", "moe", "packed", "packed-moe"])
@pytest.mark.parametrize("stage", ["pretrain", "sft", "lora", "dpo", "dpo_lora"])
def test_accumulation_changes_no_update_in_any_stage(make_run, stage, overrides):
    assert_accumulation_changes_no_update(make_run, stage, *overrides, rows=60 if PACKED[0] in overrides else 36)


@pytest.mark.slow
def test_accumulation_changes_no_update_of_packed_experts(make_run):
    """The cell of the test above that is most likely to fail, in the fast suite."""
    assert_accumulation_changes_no_update(make_run, "sft", *MOE, *PACKED, rows=60)


@pytest.mark.slow
@pytest.mark.parametrize("stage, overrides", list(registered_combinations(warmup_steps=1)))
def test_accumulation_changes_no_update_of_any_registered_choice(make_run, stage, overrides):
    # Muon orthogonalizes in bf16, which amplifies rounding differences
    atol = 2e-4 if "optimizer=muon" in overrides else 2e-5
    assert_accumulation_changes_no_update(make_run, stage, *overrides, max_steps=3, atol=atol)


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_loss_of_random_weights_is_log_vocab_size(make_run, stage):
    state = make_run(stage)
    assert first_step(state).means["loss"] == pytest.approx(math.log(state.cfg.model.vocab_size), rel=0.02)


@pytest.mark.parametrize("stage", ["dpo", "dpo_lora"])
def test_loss_of_dpo_at_its_reference_is_log_2(make_run, stage):
    result = first_step(make_run(stage, "stage.nll_coef=0"))
    assert result.means["loss"] == pytest.approx(math.log(2), abs=1e-6) and result.means["reward_margin"] == 0


@pytest.mark.parametrize(
    "stage, rows, overrides",
    [
        ("pretrain", 1, []),
        pytest.param("sft", 4, [], marks=pytest.mark.slow),
        pytest.param("dpo", 4, ["stage.nll_coef=0"], marks=pytest.mark.slow),
    ],
)
def test_loss_of_a_memorized_batch_goes_to_zero(make_run, stage, rows, overrides):
    """Pretraining on one row: the first token of several rows cannot be predicted."""
    state = make_run(
        stage,
        *overrides,
        "train.max_steps=40",
        "train.log_every=40",
        "optimizer.lr=3e-2",
        "schedule=constant",
        rows=rows,
    )
    train(state)
    assert state.progress.recent_losses[-1] < 0.05


def test_loss_that_is_logged_is_the_loss_that_was_differentiated(make_run, logged):
    state = make_run("sft", "train.batch_size=2", "train.accumulation_steps=4", "train.max_steps=1")
    batches = next(state.loader.iter_epoch(0))
    with torch.no_grad():
        loss = sum(state.objective.loss(state.model, batch)["loss"] for batch in batches) / sum(
            batch.num_supervised_tokens for batch in batches
        )
    train(state)
    assert logged(state.run_dir)[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_metrics_count_tokens_with_a_label_and_all_tokens(make_run, logged):
    state = make_run("sft", "train.max_steps=2")
    steps = [batches for _, batches in zip(range(2), state.loader.iter_epoch(0), strict=False)]
    train(state)
    for number, record in enumerate(logged(state.run_dir), start=1):
        batches = [batch for step in steps[:number] for batch in step]
        assert record["loss_tokens"] == sum(int((batch.labels != -100).sum()) for batch in batches)
        assert record["tokens"] == sum(int(batch.lengths.sum()) for batch in batches) > record["loss_tokens"]


@pytest.mark.slow
def test_lr_that_is_logged_follows_the_schedule_with_accumulation(make_run, logged):
    state = make_run("pretrain", "train.batch_size=1", "train.accumulation_steps=4")
    train(state)
    assert [record["lr"] for record in logged(state.run_dir)] == [
        lr_at(step, state.total_steps, 1e-3, state.cfg.schedule) for step in range(state.total_steps)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_train_fails_if_the_token_store_is_damaged_meanwhile(make_run, workers):
    state = make_run("pretrain", f"data.num_workers={workers}")
    (tokens,) = (state.run_dir.parent / "cache").glob("*/tokens.bin")
    tokens.write_bytes(bytes(byte ^ 1 for byte in tokens.read_bytes()))
    with pytest.raises(TrainingError, match="damaged"):
        train(state)
    assert multiprocessing.active_children() == []


def test_train_that_fails_leaves_no_data_workers(make_run):
    """They ignore signals, so the process would not end."""
    state = make_run("pretrain", "data.num_workers=2", "train.max_nonfinite_steps=1")
    with torch.no_grad():
        state.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(DivergedError, match="not finite") as error:
        train(state)
    assert error.traceback and multiprocessing.active_children() == []


@pytest.mark.slow
def test_train_fails_if_the_final_loss_is_far_above_a_uniform_distribution(make_run):
    state = make_run("pretrain", "optimizer.lr=5", "train.max_steps=8", "schedule=constant")
    with pytest.raises(DivergedError, match="the final loss is"):
        train(state)
    assert not (state.run_dir / "model").exists()


def test_train_saves_the_current_step_if_a_stop_is_requested(make_run):
    state = make_run("pretrain")
    with pytest.raises(Interrupted):
        train(state, stop_requested=lambda: state.progress.step == 3)
    assert (state.run_dir / "checkpoints" / "step-00000003" / "MANIFEST.json").exists()


@pytest.mark.slow
def test_train_stops_early_after_patience_evaluations(make_run, logged):
    overrides = [
        "train.max_steps=60",
        "train.eval_every=1",
        "train.patience=3",
        "data.val_fraction=0.1",
        "optimizer.lr=0.3",
        "schedule=constant",
    ]
    state = make_run("pretrain", *overrides)
    train(state)
    assert state.stopped_early and state.progress.step == state.progress.best_step + 3 < 60
    assert logged(state.run_dir, "eval")[-1]["step"] == state.progress.step


def test_best_evaluation_is_the_one_with_the_lowest_loss(make_run, monkeypatch):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0, 5: 4.0}
    monkeypatch.setattr("runner.engine.evaluation.evaluate_loss", lambda state: {"loss": losses[state.progress.step]})
    state = make_run("pretrain", "train.max_steps=5", "train.eval_every=1", "data.val_fraction=0.1")
    train(state)
    assert (state.progress.best_loss, state.progress.best_step, state.progress.evals_since_best) == (1.0, 2, 3)


@pytest.mark.parametrize("stage", ["lora", "dpo_lora"])
def test_train_with_lora_changes_adapters_only(make_run, stage):
    state = make_run(stage, "train.max_steps=3")
    before = weights(state)
    train(state)
    changed = differing(weights(state), before)
    assert changed and all("lora" in name for name in changed)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["train.eval_every=1", "data.val_fraction=0.1"], id="evaluation"),
        pytest.param(["train.sample_every=1", "train.sample_prompts=[goats]"], id="samples", marks=pytest.mark.slow),
    ],
)
def test_evaluation_and_samples_do_not_change_the_training(make_run, overrides):
    shared = [
        "model.dropout=0.1",
        "train.max_steps=5",
        *(override for override in overrides if "val_fraction" in override),
    ]
    train(without := make_run("pretrain", "train.sample_prompts=[]", *shared, folder="without"))
    train(watched := make_run("pretrain", *shared, *overrides, folder="watched"))
    assert differing(weights(without), weights(watched)) == []


def test_evaluation_rows_are_never_trained_on(make_run):
    state = make_run("pretrain", "data.val_fraction=0.25")
    trained, evaluated = (
        {name for batches in loader.iter_epoch(0) for batch in batches for name in batch.names}
        for loader in (state.loader, state.val_loaders[""])
    )
    assert len(trained) == 27 and len(evaluated) == 9 and not trained & evaluated


@pytest.mark.slow
def test_evaluation_loss_does_not_depend_on_the_batch_size(make_run):
    losses = [
        evaluate_loss(make_run("sft", "data.val_fraction=0.5", f"train.batch_size={size}", folder=str(size)))["loss"]
        for size in (1, 3, 18)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_evaluation_that_fails_leaves_no_data_workers(make_run):
    state = make_run("pretrain", "data.num_workers=1", "data.val_fraction=0.3")
    state.objective.count = lambda batch: 1 // 0
    with pytest.raises(ZeroDivisionError) as error:
        evaluate_loss(state)
    assert error.traceback and multiprocessing.active_children() == []


def set_nonfinite_loss(state, steps):
    """Make the loss NaN in the steps that follow step numbers `steps`."""
    original = state.objective.loss

    def loss(model, batch):
        sums = original(model, batch)
        return {**sums, "loss": sums["loss"] * math.nan} if state.progress.step in steps else sums

    state.objective.loss = loss
    return state


@pytest.mark.slow
def test_fp16_repeats_an_overflowing_step_with_a_smaller_loss_scale(make_run, logged):
    state = make_run("pretrain", "precision=fp16", "train.max_steps=3")
    state.precision.load_state_dict(state.precision.state_dict() | {"scale": 2.0**40})
    train(state)
    records = logged(state.run_dir)
    assert [record["step"] for record in records] == [1, 2, 3] and state.progress.overflows > 0
    assert records[-1]["overflows"] == state.progress.overflows and records[-1]["scale"] == 2.0 ** (
        40 - state.progress.overflows
    )
    assert all(torch.isfinite(weight).all() for weight in weights(state).values())


@pytest.mark.slow
def test_fp16_that_overflows_at_every_loss_scale_ends_the_run(make_run):
    state = set_nonfinite_loss(make_run("pretrain", "precision=fp16"), steps={1})
    with pytest.raises(DivergedError, match="precision=bf16"):
        train(state)
    assert state.precision.loss_scale > 0
    assert all(torch.isfinite(weight).all() for weight in weights(state).values())


@pytest.mark.slow
def test_fp16_lowers_the_loss_scale_if_only_the_loss_overflows(make_run):
    state = make_run("pretrain", "precision=fp16")
    original = state.objective.loss
    state.objective.loss = lambda model, batch: {
        "loss": original(model, batch)["loss"] + (math.inf if state.precision.loss_scale > 2.0**10 else 0.0)
    }
    step_with_retries(state, next(state.loader.iter_epoch(0)), 1e-3)
    assert state.precision.loss_scale == 2.0**10 and state.progress.step == 1 and state.progress.overflows == 6


def test_metric_named_like_a_field_of_the_record_is_refused(make_run):
    state = make_run("sft")
    original = state.objective.loss
    state.objective.loss = lambda model, batch: original(model, batch) | {"tokens": torch.ones(())}
    with pytest.raises(TypeError, match="multiple values for keyword argument 'tokens'"):
        train(state)


def test_fp16_checks_for_a_stop_between_two_tries_of_a_step(make_run):
    state = set_nonfinite_loss(make_run("pretrain", "precision=fp16"), steps={0})
    with pytest.raises(Interrupted):
        train(state, stop_requested=lambda: state.progress.overflows == 2)
    assert state.progress.step == 0


@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_is_the_dtype_of_matmuls_and_not_of_weights(make_run, name, dtype):
    state, dtypes = make_run("pretrain", f"precision={name}"), set()
    state.model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: dtypes.add(output.dtype)
    )
    train_step(state, next(state.loader.iter_epoch(0)), lr=1e-3)
    assert dtypes == {dtype} and all(p.dtype == torch.float32 for p in state.model.parameters())


@pytest.mark.parametrize("stage, mode", [("sft", "full"), *(pytest.param(*cell, marks=pytest.mark.slow) for cell in [("dpo_lora", "selective"), ("sft", "selective"), ("dpo_lora", "full")])])  # fmt: skip
def test_activation_checkpointing_changes_no_bit(make_run, logged, stage, mode):
    overrides = ["precision=bf16", "data.packing=best_fit", "model.dropout=0.1", "train.max_steps=3"]
    train(stored := make_run(stage, *overrides, "train.activation_checkpointing=none", folder="stored"))
    train(recomputed := make_run(stage, *overrides, f"train.activation_checkpointing={mode}", folder="recomputed"))
    assert recomputed.model.activation_checkpointing == mode
    assert [record["loss"] for record in logged(stored.run_dir)] == [
        record["loss"] for record in logged(recomputed.run_dir)
    ]
    assert differing(weights(stored), weights(recomputed)) == []


@only_full
@pytest.mark.slow
def test_compiled_layers_change_losses_by_rounding_only(make_run, logged):
    train(eager := make_run("sft", folder="eager"))
    train(compiled := make_run("sft", "train.compile=default", folder="compiled"))
    for record, other in zip(logged(eager.run_dir), logged(compiled.run_dir), strict=True):
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_router_gets_a_gradient_from_the_language_model_loss(make_run):
    state = make_run(
        "pretrain",
        *MOE[:1],
        "model.num_experts_per_tok=1",
        "model.moe_intermediate_size=32",
        "model.router_aux_loss_coef=0",
    )
    batch = next(state.loader.iter_epoch(0))[0]
    state.objective.loss(state.model.train(), batch)["loss"].backward()
    assert (
        max(p.grad.abs().max() for name, p in state.model.named_parameters() if name.endswith("mlp.gate.weight")) > 1e-4
    )


def test_frozen_parameters_keep_their_values_and_others_change(make_run):
    state = make_run("sft", "train.freeze=[embed_tokens,layers.0-0]", "optimizer=muon", "train.max_steps=3")
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    train(state)
    changed = {name for name, p in state.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "layers.1." in name or name == "model.norm.weight"}


@pytest.mark.parametrize(
    ("paths", "problem", "fix"),
    [
        (["embed_token"], "no parameters below embed_token", "did you mean embed_tokens?"),
        (["layers.2-9"], "no parameters below layers.2-9", "did you mean layers?"),
        (["mlp", "model"], "leaves no parameter to train", "leave some out"),
    ],
)
def test_frozen_paths_that_cannot_be_meant_are_refused(make_run, paths, problem, fix):
    with pytest.raises(UserError, match=problem) as raised:
        make_run("sft", f"train.freeze=[{','.join(paths)}]")
    assert raised.value.fix == fix


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "traced"), [(2, 2), (5, 4)])
def test_profile_traces_the_steps_that_are_asked_for(make_run, steps, traced):
    overrides = ["train.max_steps=6", "train.eval_every=0", "train.save_every=0", "train.sample_every=0"]
    train(plain := make_run("sft", *overrides, folder="plain"))
    train(state := make_run("sft", *overrides, f"train.profile={steps}"))
    events = json.loads((state.run_dir / "profile.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"ProfilerStep#2", "ProfilerStep#3", "aten::mm"} <= names and "ProfilerStep#1" not in names
    assert (
        f"a trace of {traced} steps is in {state.run_dir / 'profile.json'}" in (state.run_dir / "train.log").read_text()
    )
    for ours, others in zip(state.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, others)


def test_profile_that_cannot_be_written_is_a_warning(make_run):
    state = make_run("sft", "train.max_steps=4", "train.profile=1", "train.eval_every=0")
    (state.run_dir / "profile.json").mkdir()
    (state.run_dir / "profile.json" / "mine").touch()
    train(state)
    assert "the trace of train.profile=1 could not be written" in (state.run_dir / "train.log").read_text()
