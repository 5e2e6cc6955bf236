"""The best weights: saved at the best evaluation, exported to model/, and described by one number in run.json."""

import json

import pytest
import safetensors.torch
import torch

from common.errors import Interrupted, UserError
from models.formats.load import load_weights
from runner.checkpoint.saving import find_best_weights
from runner.diagnostics.symptoms import RecordedEvaluations
from runner.engine import evaluation, loop
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

RUN = ["data.val_fraction=0.2", "train.max_steps=12", "train.batch_size=2", "train.eval_every=2", "train.save_every=5"]
# of the evaluations: the best is step 4, which no save_every hits
LOSSES = {2: 5.0, 4: 3.0, 6: 4.11, 8: 3.5, 10: 6.0, 12: 6.95}


@pytest.fixture
def scripted_losses(monkeypatch):
    """Evaluate as always, and replace the loss by that of LOSSES; return the weights at each evaluation."""
    seen, evaluate = {}, evaluation.evaluate_loss

    def scripted(state):
        seen[state.progress.step] = {
            name: p.detach().clone() for name, p in state.model.named_parameters() if p.requires_grad
        }
        return evaluate(state) | {"loss": LOSSES[state.progress.step]}

    monkeypatch.setattr(evaluation, "evaluate_loss", scripted)
    return seen


def assert_equal_weights(saved, weights):
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    "stage", [pytest.param("sft", marks=pytest.mark.slow), "lora", pytest.param("dpo", marks=pytest.mark.slow)]
)
def test_best_weights_of_every_stage_are_saved_and_exported(make_run, scripted_losses, stage):
    """As in the sweep whose winner had 4.11 in the table and exported weights that evaluate to 6.95."""
    loss = train(state := make_run(stage, *RUN))
    best = state.checkpoints.dir / (state.checkpoints.dir / "best").read_text().strip()
    assert (loss, best.name, state.metadata.fields["export"]) == (
        3.0,
        "best-00000004",
        {"weights": "best", "step": 4, "loss": 3.0},
    )
    assert_equal_weights(safetensors.torch.load_file(best / "model.safetensors"), scripted_losses[4])
    if stage != "lora":
        exported = load_weights(state.run_dir)
        assert all(torch.equal(exported[name], weight) for name, weight in scripted_losses[4].items())
    else:
        adapter = safetensors.torch.load_file(state.run_dir / "model" / "adapter_model.safetensors")
        written = {tensor.sum().item() for tensor in adapter.values()}
        assert (
            written
            == {tensor.sum().item() for tensor in scripted_losses[4].values()}
            != {tensor.sum().item() for tensor in scripted_losses[12].values()}
        )


@pytest.mark.slow
def test_best_weights_evaluate_to_the_number_that_is_recorded(make_run, monkeypatch):
    """The last evaluation is not the best one: the weights are noise by then."""
    evaluate = evaluation.evaluate_loss

    def spoil_at_end(state):
        if state.progress.step == 12:
            for parameter in state.model.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
        return evaluate(state)

    monkeypatch.setattr(evaluation, "evaluate_loss", spoil_at_end)
    train(state := make_run("sft", *RUN, "optimizer.lr=1e-2"))
    exported = state.metadata.fields["export"]
    assert exported["weights"] == "best" and exported["step"] < 12
    state.model.load_state_dict(load_weights(state.run_dir), strict=False)
    assert evaluate(state)["loss"] == pytest.approx(exported["loss"], abs=1e-6)


@pytest.mark.slow
def test_last_weights_are_exported_if_asked_for_or_without_validation(make_run, scripted_losses):
    for overrides, loss in ((["export.weights=last"], 6.95), (["data.val_fraction=0"], None)):
        train(state := make_run("sft", *RUN, *overrides, folder=str(loss)))
        assert state.metadata.fields["export"] == {"weights": "last", "step": 12, "loss": loss}
        assert_equal_weights(load_weights(state.run_dir), dict(state.model.named_parameters()))


@pytest.mark.slow
def test_average_of_the_weights_is_evaluated_and_exported(make_run):
    evaluate = evaluation.evaluate_loss
    overrides = ["train.ema_decay=0.5", "optimizer.lr=1e-2"]  # which export.weights=auto exports
    loss = train(state := make_run("sft", *RUN, *overrides))
    exported = state.metadata.fields["export"]
    assert exported == {"weights": "ema", "step": 12, "loss": loss} and loss != state.progress.eval_loss
    written = load_weights(state.run_dir)
    saved = safetensors.torch.load_file(state.checkpoints.dir / "step-00000012" / "optimizer.safetensors")
    averages = {name: saved[f"{name}/average"] for name, p in state.model.named_parameters()}
    assert_equal_weights(written, averages)
    last = safetensors.torch.load_file(state.checkpoints.dir / "step-00000012" / "model.safetensors")
    assert not any(torch.equal(last[name], average) for name, average in averages.items())
    state.model.load_state_dict(written, strict=False)
    assert evaluate(state)["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.slow
def test_average_that_no_step_had_is_not_exported_in_silence(make_run):
    with pytest.raises(UserError, match="export.weights=ema needs the average of the weights"):
        make_run("sft", "export.weights=ema")
    train(make_run("sft", *RUN, "export.weights=last"))
    resumed = make_run("sft", *RUN, "train.ema_decay=0.5", "export.weights=ema", attempt=2)
    train(resumed)
    assert "no step was averaged: the last weights are exported" in (resumed.run_dir / "train.log").read_text()
    assert resumed.metadata.fields["export"]["weights"] == "last"


def test_best_weights_without_evaluations_are_refused(make_run):
    with pytest.raises(UserError, match="export.weights=best needs evaluations"):
        make_run("sft", "export.weights=best")


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param((4,), marks=pytest.mark.slow),
        pytest.param((5,), marks=pytest.mark.slow),
        pytest.param((3, 7, 9), marks=pytest.mark.slow),
    ],
)
def test_best_weights_after_a_resume_are_those_of_the_uninterrupted_run(make_run, scripted_losses, stops):
    train(make_run("pretrain", *RUN, folder="uninterrupted"))
    for attempt, stop in enumerate([*stops, None], 1):
        state = make_run("pretrain", *RUN, folder="stopped", attempt=attempt)
        try:
            train(state, stop_requested=lambda stop=stop, state=state: state.progress.step == stop)
        except Interrupted:
            state.logger.finish("interrupted")
    assert diff_run_dirs(state.run_dir.parent / "uninterrupted", state.run_dir) == []


@pytest.mark.slow
def test_best_weights_of_steps_that_a_resume_repeats_are_forgotten(make_run, monkeypatch):
    """Killed after step 8, the newest checkpoint is of step 5: best-8 belongs to steps that are trained again, with
    other settings.
    """
    losses = {2: 5.0, 4: 4.0, 6: 3.0, 8: 2.0, 10: 9.0, 12: 9.0}
    monkeypatch.setattr(evaluation, "evaluate_loss", lambda state: {"loss": losses[state.progress.step]})
    state = make_run("pretrain", *RUN)
    monkeypatch.setattr(loop, "save_before_failure", lambda state, error: None)  # as a kill
    with pytest.raises(KeyboardInterrupt):
        train(state, stop_requested=lambda: state.progress.step == 9 and (_ for _ in ()).throw(KeyboardInterrupt))
    names = sorted(path.name for path in state.checkpoints.dir.glob("*-*"))
    # that of step 4 is the best of step 5, which a resume starts from
    assert names == ["best-00000004", "best-00000008", "step-00000005"]
    losses |= {6: 9.0, 8: 9.0}
    resumed = make_run("pretrain", *RUN, "optimizer.lr=2e-3", attempt=2)
    assert train(resumed) == 4.0 and (resumed.checkpoints.dir / "best").read_text() == "best-00000004\n"
    assert not list(resumed.checkpoints.dir.glob("best-00000008"))


@pytest.mark.slow
def test_best_weights_of_other_evaluation_rows_are_forgotten(make_run, scripted_losses, logged):
    """A resume with another validation file: 3.0 on the rows before cannot be compared with a loss on the rows now."""
    state = make_run("pretrain", *RUN)
    with pytest.raises(Interrupted):
        train(state, stop_requested=lambda: state.progress.step == 6)
    resumed = make_run("pretrain", *RUN, attempt=2)
    resumed.pipeline.evaluation["data"] = "that of another file"
    assert train(resumed) == 3.5 and resumed.metadata.fields["export"] == {"weights": "best", "step": 8, "loss": 3.5}
    assert (resumed.checkpoints.dir / "best").read_text() == "best-00000008\n"
    assert "warning: the evaluation rows or their loss have changed" in (state.run_dir / "train.log").read_text()
    evaluations = RecordedEvaluations()
    for record in logged(state.run_dir, "eval"):
        evaluations.add("eval", record["step"], record["loss"], record.get("rows_since", 0))
    assert [evaluation.step for evaluation in evaluations.evaluations] == [6, 8, 10, 12]


@pytest.mark.slow
def test_best_weights_that_are_gone_are_not_replaced_in_silence(make_run, scripted_losses, capsys):
    state = make_run("pretrain", *RUN)

    def damage_at_end():
        if state.progress.step == 11 and (best := find_best_weights(state.checkpoints.dir, 4)):
            (best / "model.safetensors").write_bytes(b"")
        return False

    assert train(state, stop_requested=damage_at_end) == 6.95
    assert state.metadata.fields["export"] == {"weights": "last", "step": 12, "loss": 6.95}
    assert "weights of the best evaluation, step 4, are not on disk" in (state.run_dir / "train.log").read_text()


@pytest.mark.slow
def test_run_without_validation_data_is_judged_on_training_rows(make_run):
    """Two batch sizes and seeds: the slice is the same, is evaluated once, and changes no bit of the training."""
    runs = {}
    for name, overrides in {
        "a": [],
        "b": ["train.batch_size=4", "seed=7"],
        "without": ["train.final_eval_rows=0"],
    }.items():
        runs[name] = make_run("sft", "train.final_eval_rows=10", "train.eval_every=2", *overrides, folder=name)
        train(runs[name])
    recorded = {name: run.metadata.fields for name, run in runs.items()}
    assert recorded["a"]["evaluation"] == recorded["b"]["evaluation"] and recorded["a"]["evaluation"]["rows"] == 10
    assert (
        recorded["a"]["evaluation"]["on"],
        recorded["a"]["export"]["weights"],
        recorded["without"]["evaluation"],
    ) == ("training", "last", None)
    records = {
        name: [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        for name, run in runs.items()
    }
    assert [record["step"] for record in records["a"] if record["kind"] == "eval"] == [runs["a"].total_steps]
    losses = {
        name: [record["loss"] for record in found if record["kind"] == "train"] for name, found in records.items()
    }
    assert losses["a"] == losses["without"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_best_weights_of_two_ranks_are_whole_and_exported(run_ranks, overrides_for, tmp_path, strategy):
    """Under fsdp the shards of all ranks are gathered for the best weights, too."""
    overrides = [
        *RUN,
        f"distributed={strategy}",
        "distributed.nproc=2",
        "device=cpu",
        "train.batch_size=1",
        "optimizer.lr=0.5",
        "train.max_steps=11",
        "schedule.warmup_steps=11",
        "optimizer.grad_clip=0",
    ]
    run_ranks(2, [{"folder": str(tmp_path / "run"), "overrides": overrides_for("sft", *overrides)}])
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "eval"}
    best = tmp_path / "run" / "checkpoints" / (tmp_path / "run" / "checkpoints" / "best").read_text().strip()
    # the learning rate grows until the loss does
    assert int(best.name[5:]) == min(losses, key=lambda step: losses[step]) < 11, losses
    exported = load_weights(tmp_path / "run")
    saved = safetensors.torch.load_file(best / "model.safetensors")
    assert saved.keys() <= exported.keys() and all(
        torch.equal(exported[name], weight) for name, weight in saved.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_average_of_two_ranks_is_whole_and_exported(run_ranks, overrides_for, tmp_path, strategy):
    overrides = [
        *RUN,
        f"distributed={strategy}",
        "distributed.nproc=2",
        "device=cpu",
        "train.ema_decay=0.5",
        "export.weights=ema",
    ]
    run_ranks(2, [{"folder": str(tmp_path / "run"), "overrides": overrides_for("sft", *overrides)}])
    saved = safetensors.torch.load_file(tmp_path / "run" / "checkpoints" / "step-00000012" / "optimizer.safetensors")
    exported = load_weights(tmp_path / "run")
    averages = {name.removesuffix("/average"): tensor for name, tensor in saved.items() if name.endswith("/average")}
    assert averages
    assert_equal_weights({name: exported[name] for name in averages}, averages)


@pytest.mark.slow
def test_last_weights_without_an_evaluation_of_their_own_have_no_loss(make_run, scripted_losses):
    """The evaluation of step 4 is of other weights than those of step 6."""
    with pytest.raises(Interrupted):
        train(state := make_run("sft", *RUN), stop_requested=lambda: state.progress.step == 5)
    resumed = make_run("sft", *RUN, "train.max_steps=6", "train.eval_every=0", "export.weights=last", attempt=2)
    train(resumed)
    assert resumed.metadata.fields["export"] == {"weights": "last", "step": 6, "loss": None}
