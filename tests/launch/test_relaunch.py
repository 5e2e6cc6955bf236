import dataclasses
import json

import pytest
import yaml

from runner.engine.durable import write_folder
from runner.launch import places, relaunch
from runner.launch.compose import compose
from runner.launch.words import ROOT


@pytest.fixture
def run(tmp_path):
    """The folder of a run that was started with stage=sft seed=7."""
    hydra = tmp_path / "run" / ".hydra"
    hydra.mkdir(parents=True)
    words = ["stage=sft", "seed=7"]
    (hydra / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(compose(words))))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(words))
    (hydra.parent / "run.json").write_text(json.dumps({"status": "interrupted"}))
    return hydra.parent


def config_of(folder, *words):
    with relaunch.kept(relaunch.planned(folder, list(words))) as config:
        return config


def test_a_run_is_found_by_anything_inside_it(run):
    inside = run / "model" / "config.json"
    inside.parent.mkdir()
    inside.touch()
    assert places.find(str(run)) == places.find(str(inside)) == places.find(str(run / "run.json")) == run


def test_a_path_that_is_not_there_is_refused_though_a_run_lies_above_it(run):
    with pytest.raises(ValueError, match="no such file"):
        places.find(str(run / "typo" / "nothing.here"))


def test_a_checkpoint_asked_for_by_name_must_be_whole_and_the_newest(run):
    older, newest = (run / "checkpoints" / f"step-{step:08d}" for step in (10, 20))
    for folder in (older, newest):
        write_folder(folder.parent, folder.name, {"state.json": b"{}"}, {})
    assert places.find(str(newest)) == run
    with pytest.raises(ValueError, match="newer checkpoints: step-00000020"):
        places.find(str(older))
    (newest / "state.json").write_bytes(b"[]")
    with pytest.raises(ValueError, match="not whole"):
        places.find(str(newest))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run here"):
        places.find(str(tmp_path))


def test_the_stored_words_are_the_truth(run):
    assert config_of(run) == compose(["stage=sft", "seed=7"])
    assert not (run / ".hydra" / "history").exists()


def test_words_on_top_count_and_stay(run):
    assert config_of(run, "train.max_steps=50", "schedule=linear").train.max_steps == 50
    again = config_of(run)
    assert again.train.max_steps == 50 and again.schedule.name == "linear" and again.seed == 7
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == ["stage=sft", "seed=7", "train.max_steps=50", "schedule=linear"]
    assert yaml.safe_load((run / ".hydra" / "history" / "000" / "overrides.yaml").read_text()) == ["stage=sft", "seed=7"]


def test_words_the_run_refuses_leave_its_folder_as_it_was(run):
    before = {path.name: path.read_bytes() for path in (run / ".hydra").glob("*.yaml")}
    with pytest.raises(ValueError), relaunch.kept(relaunch.planned(run, ["seed=8"])):
        raise ValueError("this run is not the one", "seed", "resume with the stored words")
    assert {path.name: path.read_bytes() for path in (run / ".hydra").glob("*.yaml")} == before
    assert not list((run / ".hydra" / "history").iterdir())


@pytest.mark.parametrize("word", ["stage=dpo", "model=minimind_26m", "data=dpo"])
def test_a_run_keeps_its_stage_model_and_data(run, word):
    with pytest.raises(ValueError, match="a run keeps its"):
        config_of(run, word)


@pytest.mark.parametrize("word", ["optimizer.lr=1e-3,2e-3", "schedule=linear,cosine"])
def test_a_resumed_run_takes_one_value(run, word):
    with pytest.raises(ValueError, match="takes one value"):
        config_of(run, word)


def test_a_mistyped_word_is_refused_with_the_nearest(run):
    with pytest.raises(ValueError) as refusal:
        config_of(run, "train.max_step=50")
    assert "train.max_steps" in refusal.value.args[2]


def test_paths_of_the_repository_follow_it(run):
    path = run / ".hydra" / "config.yaml"
    path.write_text(path.read_text().replace(str(ROOT), "${repo:}"))
    assert config_of(run) == compose(["stage=sft", "seed=7"])


@pytest.mark.parametrize("value", [{"_target_": "os.system", "command": "true"}, "${oc.env:HOME}", "x${repo:}"])
def test_a_config_that_reaches_outside_or_names_code_is_refused(run, value):
    path = run / ".hydra" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["data"]["name"] = value
    path.write_text(yaml.safe_dump(stored))
    with pytest.raises(ValueError) as refusal:
        config_of(run)
    assert len(refusal.value.args) == 3


@pytest.mark.parametrize("text", ["", "just words", "!!python/object/apply:os.system ['true']"])
def test_a_config_that_is_none_is_refused(run, text):
    (run / ".hydra" / "config.yaml").write_text(text)
    with pytest.raises(ValueError) as refusal:
        config_of(run)
    assert len(refusal.value.args) == 3
