import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from common.errors import Interrupted
from runner.checkpoint.compatibility import COMPATIBILITY_RULES, _flatten, rule_of
from runner.config.compose import compose_config
from runner.engine.loop import train

DOCS = Path(__file__).parents[2] / "docs" / "resume.md"


def stopped(make_run, stage, *words, **options):
    state = make_run(stage, "train.max_steps=6", *words, **options)
    with pytest.raises(Interrupted):
        train(state, stop=lambda: state.progress.step == 3)
    return state


def test_the_docs_show_the_table_of_the_code():
    rows = {line.split("|")[1].strip(): line.split("|")[3] for line in DOCS.read_text().splitlines() if line.startswith("| ") and "`" in line}
    assert {row: tuple(words.replace("`", "").split()) for row, words in rows.items()} == COMPATIBILITY_RULES


def test_every_pattern_of_the_table_names_a_word_that_exists():
    words = {word for stage in ("pretrain", "lora") for word, _ in _flatten(dataclasses.asdict(compose_config([f"stage={stage}"])), "")} | {"environment.torch"}
    for row, patterns in COMPATIBILITY_RULES.items():
        assert [pattern for pattern in patterns if not any(rule_of(word) == row for word in words if word == pattern or "*" in pattern)] == []


@pytest.mark.parametrize(
    "words, named",
    [(["model.hidden_size=48"], "model.hidden_size: 32 -> 48"), (["seed=7"], "seed: 42 -> 7"), (["train.batch_size=8"], "rows of a step: 4 -> 8"), (["optimizer=muon"], "optimizer.name: adamw -> muon"),
     (["model.dropout=0.1"], "model.dropout"), (["data.max_length=32"], "data.max_length"), (["precision=bf16"], "precision.name"), (["data.val_fraction=0.1"], "data.val_fraction")],
)  # fmt: skip
def test_another_run_is_refused_with_a_table_of_what_differs(make_run, words, named):
    stopped(make_run, "pretrain")
    with pytest.raises(ValueError, match="not the one the checkpoint was saved by") as refusal:
        train(make_run("pretrain", "train.max_steps=6", *words))
    assert named in refusal.value.args[0] and len(refusal.value.args) == 3


def test_changed_data_is_refused_though_its_path_is_the_same(make_run):
    state = stopped(make_run, "pretrain", rows=36)
    path = Path(state.cfg.data.path)
    path.write_text(path.read_text().replace("goats", "sheep"))
    again = make_run("pretrain", "train.max_steps=6", rows=30)
    with pytest.raises(ValueError, match="content of the data"):
        train(again)


@pytest.mark.parametrize("stage", ["lora", "dpo", "dpo_lora"])
def test_other_weights_under_the_adapters_or_as_reference_are_refused(make_run, stage, monkeypatch):
    stopped(make_run, stage)
    monkeypatch.setattr("runner.engine.build.seed_all", lambda seed: torch.manual_seed(seed + 1))
    with pytest.raises(ValueError, match="weights it starts from"):
        train(make_run(stage, "train.max_steps=6"))


def test_the_rate_comes_from_the_words_and_the_change_is_recorded(make_run, logged):
    stopped(make_run, "pretrain", "schedule=constant")
    state, notes = make_run("pretrain", "train.max_steps=6", "schedule=constant", "optimizer.lr=5e-5"), {}
    state.update_metadata = lambda **facts: notes.update(facts)
    train(state)
    assert [line["lr"] for line in logged(state.run_dir)] == [1e-3] * 3 + [5e-5] * 3
    assert notes["changed"] == ["optimizer.lr: 0.001 -> 5e-05"] and "exact" not in notes


def test_another_split_of_the_step_is_allowed_and_called_inexact(make_run):
    stopped(make_run, "pretrain")
    state, notes = make_run("pretrain", "train.max_steps=6", "train.batch_size=2", "train.accumulation_steps=2"), {}
    state.update_metadata = lambda **facts: notes.update(facts)
    train(state)
    assert notes["exact"] is False and notes["inexact_because"] == ["train.accumulation_steps: 1 -> 2", "train.batch_size: 4 -> 2"]


def test_a_run_may_be_continued_with_less_memory(make_run, tmp_path):
    train(make_run("pretrain", "train.max_steps=6", folder="through"))
    stopped(make_run, "pretrain")
    state, notes = make_run("pretrain", "train.max_steps=6", "train.activation_checkpointing=selective"), {}
    state.update_metadata = lambda **facts: notes.update(facts)
    train(state)
    assert notes["inexact_because"] == ["train.activation_checkpointing: none -> selective"]
    through, weights = (safetensors.torch.load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "through", state.run_dir))
    assert all(torch.equal(through[name], weight) for name, weight in weights.items())


def test_a_resumed_run_no_longer_needs_the_folder_it_started_from(make_run, tmp_path):
    first = make_run("pretrain", "train.max_steps=1", folder="first")
    train(first)
    stopped(make_run, "sft", f"init_from={first.folder}", folder="second")
    first.run_dir.rename(tmp_path / "elsewhere")
    train(make_run("sft", "train.max_steps=6", f"init_from={first.folder}", folder="second"))


def test_a_checkpoint_that_does_not_prove_whole_is_passed_over_by_name(make_run):
    state = stopped(make_run, "pretrain", "train.save_every=1")
    (state.run_dir / "checkpoints" / "step-00000003" / "optimizer.safetensors").write_bytes(b"")
    again = make_run("pretrain", "train.max_steps=6", "train.save_every=1")
    train(again)
    log = (state.run_dir / "train.log").read_text()
    assert "step-00000003 passed over" in log and "at step 2" in log
    assert json.loads((state.run_dir / "checkpoints" / "step-00000006" / "state.json").read_text())["progress"]["step"] == 6


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_begin_anew_in_silence(make_run):
    state = stopped(make_run, "pretrain")
    for folder in (state.run_dir / "checkpoints").glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint of this run is whole"):
        train(make_run("pretrain", "train.max_steps=6"))


def test_a_run_does_not_go_back(make_run):
    stopped(make_run, "pretrain")
    with pytest.raises(ValueError, match="already stands at step 3"):
        train(make_run("pretrain", "train.max_steps=2"))


def test_the_newest_the_best_and_every_so_many_steps_stay(make_run, monkeypatch):
    monkeypatch.setattr("runner.engine.evaluation.evaluate_loss", lambda state: {"loss": abs(state.progress.step - 3.0)})
    state = make_run(
        "pretrain", "train.max_steps=12", "train.save_every=1", "train.eval_every=1", "train.keep_checkpoints=2", "train.keep_every=5", "data.val_fraction=0.1"
    )
    train(state)
    assert sorted(int(path.name[5:]) for path in (state.run_dir / "checkpoints").glob("step-*")) == [3, 5, 10, 11, 12]
    assert (state.run_dir / "checkpoints" / "best").read_text().strip() == "step-00000003"
