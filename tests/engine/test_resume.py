"""Exact resume: a run that is stopped and resumed has the same bits as the run that was never stopped."""

import itertools
import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from engine_fixtures import composed, pairwise, registered_combinations
from fault_counts import only_full

from common.errors import Interrupted, Outcome, StopRequested
from runner.checkpoint import atomic_dir
from runner.checkpoint.format import read_model_tensors
from runner.checkpoint.manager import newest_checkpoint
from runner.engine import verify_resume as verify
from runner.engine.device import cpu
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs, verify_resume

TWO_EPOCHS = [  # 18 rows and 2 for validation: two epochs of six steps
    "train.batch_size=3", "train.epochs=2", "train.save_every=5", "train.eval_every=4", "train.sample_every=6", "data.val_fraction=0.1",
    "train.sample_prompts=[goats]", "train.sample_tokens=4",
]  # fmt: skip
SWITCHES = {
    "stage": ["pretrain", "sft", "lora", "dpo"],
    "precision": ["fp32", "bf16", "fp16"],
    "train.accumulation_steps": [1, 3],
    "data.num_workers": [0, 2],
    "model.dropout": [0, 0.1],
    "optimizer": ["adamw", "muon"],
}


@pytest.fixture
def run_with_stops(make_run):
    """Train to each step of `stops` in turn, each time as a new process would, then to the end; return the run
    directory.
    """

    def run(stage, *overrides, stops, folder="stopped"):
        for attempt, stop in enumerate([*stops, None], 1):
            state = make_run(stage, *TWO_EPOCHS, *overrides, folder=folder, rows=20, attempt=attempt)
            try:
                train(state, stop_requested=lambda stop=stop, state=state: state.progress.step == stop)
            except Interrupted:
                state.logger.finish("interrupted")
            torch.manual_seed(attempt)  # the next attempt must not depend on this process's random state
        state.logger.finish("completed")
        return state.run_dir

    return run


@pytest.fixture
def assert_exact(run_with_stops):
    def check(stage, *overrides, stops):
        assert (
            diff_run_dirs(
                run_with_stops(stage, *overrides, stops=[], folder="uninterrupted"),
                run_with_stops(stage, *overrides, stops=stops),
            )
            == []
        )

    return check


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param([7], id="7"),
        pytest.param([*range(1, 12)], id="every", marks=pytest.mark.slow),
    ],
)
def test_resume_after_every_step_is_bitwise_equal(assert_exact, stops):
    overrides = ["model.dropout=0.1", "precision=bf16", "train.batch_size=1", "train.accumulation_steps=3"]
    overrides += ["train.ema_decay=0.9", "export.weights=ema", "stage.neftune_alpha=5", "stage.z_loss=1e-4"]
    assert_exact("sft", *overrides, stops=stops)


@pytest.mark.slow
def test_resume_after_max_hours_is_bitwise_equal(make_run):
    """Each launch has this time, and takes at least one step."""
    overrides = ["train.max_steps=3", "train.eval_every=0", "train.save_every=0", "train.sample_every=0"]
    for folder, hours, stops in (("uninterrupted", "1000", []), ("stopped", "1e-9", [1, 2, 3])):
        for attempt, stop in enumerate([*stops, None], 1):
            limit = f"train.max_hours={hours}"
            state = make_run("sft", *overrides, limit, folder=folder, attempt=attempt)
            if stop is None:
                train(state)
                break
            with pytest.raises(Interrupted, match=f"stopped after step {stop}, saved"):
                train(state)
            assert "train.max_hours=1e-09 is over" in (state.run_dir / "train.log").read_text()
            state.logger.finish("interrupted")
    saved = [
        read_model_tensors(newest_checkpoint(state.run_dir.with_name(name))) for name in ("uninterrupted", "stopped")
    ]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


@pytest.mark.parametrize("save_every", [pytest.param("4", marks=pytest.mark.slow), "5"])
def test_resume_after_every_pause_is_bitwise_equal(make_run, save_every):
    """Evaluations after steps 4, 8 and 12: 0.3 and 0.5 are passed at 4 and 8; the last step is no pause."""
    common = [*TWO_EPOCHS, "model.dropout=0.1", f"train.save_every={save_every}"]
    folders = []
    for folder, shares in (("at_once", ["0"]), ("paused", ["0.3", "0.5", "0.9"]), ("by_hand", ["0.3", "0.3"])):
        steps = []
        for attempt, share in enumerate(shares, 1):
            overrides = [*common, f"train.stop_at={share}"]
            state = make_run("sft", *overrides, folder=folder, rows=20, attempt=attempt)
            try:
                train(state)
                state.logger.finish("completed")
            except Interrupted as error:
                assert error.outcome == Outcome.PAUSED and str(error).startswith("paused after step")
                state.logger.finish("interrupted")
            steps.append(state.progress.step)
            torch.manual_seed(attempt)
        assert steps == {"at_once": [12], "paused": [4, 8, 12], "by_hand": [4, 12]}[folder]
        folders.append(state.run_dir)
    for folder in folders[1:]:  # the settings differ in train.stop_at
        assert diff_run_dirs(folders[0], folder) == ["state.json: compatibility"]


def test_pause_comes_after_a_stop_before_its_evaluation(make_run):
    """Stopped between step 4 and its evaluation: the resumed run evaluates, and pauses there, once."""
    common = [*TWO_EPOCHS, "train.stop_at=0.3"]
    for attempt, (stop, outcome) in enumerate([(4, "interrupted"), (None, "paused")], 1):
        state = make_run("sft", *common, folder="run", rows=20, attempt=attempt)
        with pytest.raises(Interrupted) as stopped:
            train(state, stop_requested=lambda stop=stop, state=state: state.progress.step == stop)
        state.logger.finish("interrupted")
        assert (stopped.value.outcome, state.progress.step) == (outcome, 4)
    assert "train.stop_at=0.3 is reached: step 4 of 12" in (state.run_dir / "train.log").read_text()
    state = make_run("sft", *common, folder="run", rows=20, attempt=3)
    state.metadata.fields["attempts"] = [{"outcome": "paused", "step": 4}, {"outcome": "killed", "step": 5}, {}]
    train(state)
    assert state.progress.step == 12


@pytest.mark.slow
def test_verify_resume_has_its_threads_while_other_trainings_begin(overrides_for, tmp_path, monkeypatch):
    for name in cpu.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    others = itertools.chain([[]], itertools.repeat([1]))
    monkeypatch.setattr(cpu.RunningTrainings, "threads_of_others", lambda self: next(others))
    monkeypatch.setattr(cpu, "default_threads", lambda: 2)
    assert (
        verify_resume(composed(*overrides_for("pretrain", "train.max_steps=4", "init_from=scratch")), tmp_path / "work")
        == []
    )
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_verify_resume_that_is_stopped_compares_nothing(overrides_for, tmp_path, monkeypatch):
    def stop(state, stop_requested):
        raise Interrupted(state.progress.step, state.run_dir)

    monkeypatch.setattr(verify, "train", stop)
    with pytest.raises(StopRequested):
        verify_resume(composed(*overrides_for("pretrain", "init_from=scratch")), tmp_path / "work")


@pytest.mark.slow
def test_verify_resume_does_not_end_after_max_hours(overrides_for, tmp_path):
    cfg = composed(*overrides_for("sft", "train.max_steps=2", "train.max_hours=1e-9", "init_from=scratch"))
    assert verify_resume(cfg, tmp_path / "work") == []


@pytest.mark.slow
def test_resume_twice_in_one_epoch_is_bitwise_equal(assert_exact):
    assert_exact("pretrain", "model.dropout=0.1", stops=[2, 4])


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.slow) for stage in ("sft", "pretrain", "dpo")])
def test_resume_of_packed_sequences_is_bitwise_equal(assert_exact, stage):
    overrides = [
        "data.packing=best_fit",
        "train.batch_size=1",
        "train.accumulation_steps=2",
        "data.num_workers=1",
        "model.dropout=0.1",
    ]
    assert_exact(stage, *overrides, stops=[2, 5])


@pytest.mark.slow
def test_resume_of_batches_grouped_by_length_is_bitwise_equal(assert_exact):
    assert_exact("sft", "data.group_by_length=true", "model.dropout=0.1", stops=[4])


@pytest.mark.slow
@pytest.mark.parametrize("stage, overrides", list(registered_combinations(warmup_steps=3)))
def test_resume_of_any_registered_choice_is_bitwise_equal(assert_exact, stage, overrides):
    assert_exact(stage, *overrides, "model.dropout=0.1", stops=[7])


def switch_cells():
    """Combinations in which every pair of values of two switches occurs."""
    for values in pairwise(*SWITCHES.values()):
        yield pytest.param(dict(zip(SWITCHES, values, strict=True)), id="-".join(map(str, values)))
    # adapters and pairs in one: to compile takes two minutes of processor time; sft: with all speed settings
    values = ("dpo_lora", "fp16", 3, 2, 0.1, "muon")
    cell = dict(zip(SWITCHES, values, strict=True)) | {"train.compile": "default"}
    yield pytest.param(cell, id="-".join(map(str, values)) + "-compiled", marks=only_full)


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(switch_cells()))
def test_resume_is_bitwise_equal_for_every_pair_of_switches(assert_exact, cell):
    overrides = [f"{key}={value}" for key, value in cell.items() if key != "stage"]
    if cell["train.accumulation_steps"] == 3:
        overrides.append("train.batch_size=1")
    assert_exact(cell["stage"], *overrides, stops=[7])


@pytest.mark.slow(long=True)
def test_resume_with_all_speed_settings_is_bitwise_equal(run_with_stops, logged):
    fast = [
        "data.packing=best_fit",
        "precision=bf16",
        "train.log_every=4",
        "data.num_workers=1",
    ]
    memory = [
        "train.activation_checkpointing=selective",
        "train.batch_size=1",
        "train.accumulation_steps=2",
        "model.dropout=0.1",
    ]
    compiled = ["train.compile=default", *fast, *memory]
    whole = run_with_stops("sft", *compiled, stops=[], folder="whole")
    assert diff_run_dirs(whole, run_with_stops("sft", *compiled, stops=[3])) == []
    records = logged(whole), logged(run_with_stops("sft", *fast, *memory, stops=[], folder="uncompiled"))
    losses, uncompiled = ([record["loss"] for record in each] for each in records)
    assert losses == pytest.approx(uncompiled, abs=0.01)  # of bf16


def edit_state(change):
    def edit(checkpoint):
        state = json.loads((checkpoint / "state.json").read_text())
        change(state)
        (checkpoint / "state.json").write_text(json.dumps(state))

    return edit


def edit_tensors(file, change):
    def edit(checkpoint):
        tensors = safetensors.torch.load_file(checkpoint / file)
        safetensors.torch.save_file(change(tensors), checkpoint / file)

    return edit


def zeroed(key):
    return edit_tensors(
        "optimizer.safetensors",
        lambda tensors: {name: torch.zeros_like(t) if name.endswith(key) else t for name, t in tensors.items()},
    )


def with_progress(**values):
    return edit_state(lambda state: state["progress"].update(values))


OMISSIONS = {  # what a format that forgets one item of the state would restore
    "weights as fp16": edit_tensors(
        "model.safetensors", lambda tensors: {name: t.half().float() for name, t in tensors.items()}
    ),
    "first moments": zeroed("exp_avg"),
    "second moments": zeroed("exp_avg_sq"),
    "step count of the optimizer": zeroed("/step"),
    "random state of torch": edit_state(
        lambda state: state["rng"][0].update(
            torch=torch.Generator().manual_seed(42).get_state().numpy().tobytes().hex()
        )
    ),
    "loss scale": edit_state(lambda state: state["scaler"].update(scale=1024.0)),
    "growth tracker of the scaler": edit_state(lambda state: state["scaler"].update(_growth_tracker=0)),
    "step": with_progress(step=0),
    "examples": with_progress(examples=0),
    "loss_tokens": with_progress(loss_tokens=0),
    "tokens": with_progress(tokens=0),
    "best loss": with_progress(best_loss=None),
    "best step": with_progress(best_step=None),
    "evaluations since the best": with_progress(evals_since_best=-3),
    "recent losses": with_progress(recent_losses=[]),
    "overflows": with_progress(overflows=9),
    "skipped steps": with_progress(nonfinite_steps=9),
}


@pytest.mark.slow
def test_resume_without_any_one_item_of_the_state_is_noticed(make_run, run_with_stops, monkeypatch, tmp_path):
    """None omits nothing: the others are noticed because of the item, not because of the edit."""
    overrides = ["precision=fp16", "model.dropout=0.1", "train.save_every=0", "train.max_steps=8"]
    # The loss grows, so the first evaluation stays the best: a wrong value is not overwritten later.
    monkeypatch.setattr("runner.engine.evaluation.evaluate_loss", lambda state: {"loss": float(state.progress.step)})
    uninterrupted = run_with_stops("pretrain", *overrides, stops=[], folder="uninterrupted")
    half = make_run("pretrain", *TWO_EPOCHS, *overrides, folder="half", rows=20)
    with pytest.raises(Interrupted):
        train(half, stop_requested=lambda: half.progress.step == 7)
    monkeypatch.setattr(atomic_dir, "verify_dir", lambda folder: None)  # the checksums would reveal every edit
    unnoticed = []
    for item in [None, *OMISSIONS]:
        folder = shutil.copytree(half.run_dir, tmp_path / "rest")
        if item:
            OMISSIONS[item](newest_checkpoint(folder))
        rest = make_run("pretrain", *TWO_EPOCHS, *overrides, folder="rest", rows=20, attempt=2)
        try:
            train(rest)
        except ValueError:
            assert item  # refused, so noticed
        else:
            unnoticed += [] if diff_run_dirs(uninterrupted, folder) else [item]
        shutil.rmtree(folder)
    assert unnoticed == [None]


def test_resume_of_a_completed_run_for_more_steps_names_its_learning_rate(make_run):
    train(make_run("pretrain", "train.max_steps=3"))
    train(resumed := make_run("pretrain", "train.max_steps=6"))
    (line,) = [line for line in (resumed.run_dir / "train.log").read_text().splitlines() if "learning rate" in line]
    assert "back to" in line and "the schedule now ends at step 6" in line
