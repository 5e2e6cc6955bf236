"""Stop anywhere, resume, and no bit differs from the run that was never stopped."""

import itertools
import json
import shutil

import pytest
import safetensors.torch
import torch

from common.errors import Interrupted
from runner.checkpoint import atomic_dir, manager
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

# 18 rows in steps of 3: six steps an epoch, two epochs.
TWO_EPOCHS = [
    "train.batch_size=3",
    "train.epochs=2",
    "train.save_every=5",
    "train.eval_every=4",
    "train.sample_every=6",
    "data.val_fraction=0.1",
    "train.sample_prompts=[goats]",
    "train.sample_tokens=4",
]


@pytest.fixture
def stop_and_go(make_run):
    """Train to each of `cuts` in turn, every time in a new run, then to the end."""

    def go(stage, *words, cuts, folder="stopped"):
        for attempt, cut in enumerate([*cuts, None], 1):
            state = make_run(stage, *TWO_EPOCHS, *words, folder=folder, rows=20, attempt=attempt)
            try:
                train(state, stop=lambda cut=cut, state=state: state.progress.step == cut)
            except Interrupted:
                state.logger.finish("interrupted", {})
            torch.manual_seed(attempt)  # nothing left in this process may help the next
        state.logger.finish("completed", {})
        return state.run_dir

    return go


def test_a_stop_after_any_step_of_two_epochs_changes_no_bit(stop_and_go):
    words = ["model.dropout=0.1", "precision=bf16", "train.batch_size=1", "train.accumulation_steps=3"]
    whole = stop_and_go("sft", *words, cuts=[], folder="whole")
    for cut in range(1, 12):
        assert diff_run_dirs(whole, stop_and_go("sft", *words, cuts=[cut], folder=f"stopped{cut}")) == [], cut


def test_two_stops_in_one_epoch_change_no_bit(stop_and_go):
    words = ["model.dropout=0.1"]
    assert diff_run_dirs(stop_and_go("pretrain", *words, cuts=[], folder="whole"), stop_and_go("pretrain", *words, cuts=[2, 4])) == []


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo"])
def test_a_stop_among_packed_windows_changes_no_bit(stop_and_go, stage):
    words = ["data.packing=best_fit", "train.batch_size=1", "train.accumulation_steps=2", "data.num_workers=1", "model.dropout=0.1"]
    assert diff_run_dirs(stop_and_go(stage, *words, cuts=[], folder="whole"), stop_and_go(stage, *words, cuts=[2, 5])) == []


def test_a_stop_among_rows_grouped_by_length_changes_no_bit(stop_and_go):
    words = ["data.group_by_length=true", "model.dropout=0.1"]
    assert diff_run_dirs(stop_and_go("sft", *words, cuts=[], folder="whole"), stop_and_go("sft", *words, cuts=[4])) == []


def cells():
    """Every pair of values of any two switches stands in some cell; the first twelve run each time, the others are slow."""
    switches = {
        "stage": ["pretrain", "sft", "lora", "dpo"],
        "precision": ["fp32", "bf16", "fp16"],
        "train.accumulation_steps": [1, 3],
        "data.num_workers": [0, 2],
        "model.dropout": [0, 0.1],
        "optimizer": ["adamw", "muon"],
    }
    every = list(itertools.product(*switches.values()))
    plain = every[::5]  # 5 shares no factor with the sizes: the walk meets every pair
    for number, cell in enumerate(plain):
        yield pytest.param(dict(zip(switches, cell, strict=True)), id="-".join(map(str, cell)), marks=[pytest.mark.slow] if number % 3 else [])
    compiled = [
        ("pretrain", "fp32", 1, 0, 0, "adamw"),
        ("sft", "bf16", 3, 2, 0.1, "adamw"),
        ("lora", "fp16", 1, 2, 0.1, "muon"),
        ("dpo", "fp32", 3, 0, 0.1, "muon"),
    ]
    for cell in compiled:
        yield pytest.param(
            dict(zip(switches, cell, strict=True)) | {"train.compile": "default"}, id="-".join(map(str, cell)) + "-compiled", marks=pytest.mark.slow
        )


@pytest.mark.parametrize("cell", list(cells()))
def test_whatever_the_switches_a_stop_changes_no_bit(stop_and_go, cell):
    stage, words = cell["stage"], [f"{word}={value}" for word, value in cell.items() if word != "stage"]
    if cell["train.accumulation_steps"] == 3:
        words.append("train.batch_size=1")
    assert diff_run_dirs(stop_and_go(stage, *words, cuts=[], folder="whole"), stop_and_go(stage, *words, cuts=[7])) == []


@pytest.mark.slow
def test_with_all_that_makes_a_step_cheap_a_stop_changes_no_bit(stop_and_go):
    fast = ["train.compile=default", "data.packing=best_fit", "precision=bf16", "train.log_every=4", "data.num_workers=1"]
    words = [*fast, "train.activation_checkpointing=selective", "train.batch_size=1", "train.accumulation_steps=2", "model.dropout=0.1"]
    assert diff_run_dirs(stop_and_go("sft", *words, cuts=[], folder="whole"), stop_and_go("sft", *words, cuts=[2, 5])) == []


def changed_state(change):
    def mutate(folder):
        state = json.loads((folder / "state.json").read_text())
        change(state)
        (folder / "state.json").write_text(json.dumps(state))

    return mutate


def changed_tensors(file, change):
    def mutate(folder):
        tensors = safetensors.torch.load_file(folder / file)
        safetensors.torch.save_file(change(tensors), folder / file)

    return mutate


def without(key):
    return changed_tensors("optimizer.safetensors", lambda tensors: {name: torch.zeros_like(t) if name.endswith(key) else t for name, t in tensors.items()})


def fresh_random(state):
    state["random"]["torch"] = torch.Generator().manual_seed(42).get_state().numpy().tobytes().hex()


def set_progress(**values):
    return changed_state(lambda state: state["progress"].update(values))


# Each leaves one item of state out, as a careless format would.
MUTANTS = {
    "weights as fp16": changed_tensors("model.safetensors", lambda tensors: {name: t.half().float() for name, t in tensors.items()}),
    "first moments": without("exp_avg"),
    "second moments": without("exp_avg_sq"),
    "the optimizer's step count": without("/step"),
    "torch's random state": changed_state(fresh_random),
    "the loss scale": changed_state(lambda state: state["scaler"].update(scale=1024.0)),
    "the scaler's growth tracker": changed_state(lambda state: state["scaler"].update(_growth_tracker=0)),
    "position": set_progress(step=0),
    "rows": set_progress(rows=0),
    "tokens": set_progress(loss_tokens=0),
    "best loss": set_progress(best_loss=None),
    "best step": set_progress(best_step=None),
    "evaluations since the best": set_progress(evals_since_best=-3),
    "last losses": set_progress(recent_losses=[]),
    "overflows": set_progress(overflows=9),
    "steps given up": set_progress(nonfinite=9),
    "place in the log": changed_state(lambda state: state["log"].update(metrics=0)),
}


def test_leaving_any_item_of_state_out_shows(make_run, stop_and_go, monkeypatch, tmp_path):
    """`None` leaves nothing out: the others fail for what they miss, not for how they are made."""
    words = ["precision=fp16", "model.dropout=0.1", "train.save_every=0"]
    # The first is the best: what is forgotten of it stays forgotten.
    monkeypatch.setattr("runner.engine.evaluation.evaluate_loss", lambda state: {"loss": float(state.progress.step)})
    whole = stop_and_go("pretrain", *words, cuts=[], folder="whole")
    half = make_run("pretrain", *TWO_EPOCHS, *words, folder="half", rows=20)
    with pytest.raises(Interrupted):
        train(half, stop=lambda: half.progress.step == 7)
    monkeypatch.setattr(atomic_dir, "verify_dir", lambda folder: None)  # the checksums would notice
    unnoticed = []
    for item in [None, *MUTANTS]:
        folder = shutil.copytree(half.folder, tmp_path / "rest")
        if item:
            MUTANTS[item](manager.newest_checkpoint(folder))
        rest = make_run("pretrain", *TWO_EPOCHS, *words, folder="rest", rows=20, attempt=2)
        try:
            train(rest)
        except ValueError:
            assert item  # refused: noticed as well
        else:
            unnoticed += [] if diff_run_dirs(whole, folder) else [item]
        shutil.rmtree(folder)
    assert unnoticed == [None]
