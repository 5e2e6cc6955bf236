"""What is read of a run folder, what words on top do to it, and what is refused."""

import dataclasses
import json
import shutil

import pytest
import yaml

from common.errors import UserError
from common.paths import REPO_ROOT
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.config.compose import compose_config
from runner.run_dir import config_snapshot, resolve, resume


@pytest.fixture
def run(begun, tmp_path):
    """The folder of a run that was started with stage=sft seed=7."""
    return shutil.copytree(begun, tmp_path / "run")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    hydra = tmp_path_factory.mktemp("begun") / "run" / ".hydra"
    hydra.mkdir(parents=True)
    words = ["stage=sft", "seed=7"]
    (hydra / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(compose_config(words))))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(words))
    (hydra.parent / "run.json").write_text(json.dumps({"status": "interrupted", "started": "2026-01-01T00:00:00+00:00", "code": {"commit": "abc123"}}))
    config_snapshot.save_snapshot(hydra.parent, words)
    return hydra.parent


def config_of(folder, *words):
    with resume.persisting_overrides(resume.plan_resume(folder, list(words))) as config:
        return config


def test_a_run_is_found_by_anything_inside_it(run):
    inside = run / "model" / "config.json"
    inside.parent.mkdir()
    inside.touch()
    assert resolve.resolve_run(str(run)) == resolve.resolve_run(str(inside)) == resolve.resolve_run(str(run / "run.json")) == run


def test_a_path_that_is_not_there_is_refused_though_a_run_lies_above_it(run):
    with pytest.raises(ValueError, match="no such file"):
        resolve.resolve_run(str(run / "typo" / "nothing.here"))


def test_a_checkpoint_asked_for_by_name_must_be_whole_and_the_newest(run):
    older, newest = (run / "checkpoints" / f"step-{step:08d}" for step in (10, 20))
    for folder in (older, newest):
        write_atomic_dir(folder.parent, folder.name, {"state.json": b"{}"}, {})
    assert resolve.resolve_run(str(newest)) == run
    with pytest.raises(ValueError, match="newer checkpoints: step-00000020"):
        resolve.resolve_run(str(older))
    (newest / "state.json").write_bytes(b"[]")
    with pytest.raises(ValueError, match="not whole"):
        resolve.resolve_run(str(newest))


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run here"):
        resolve.resolve_run(str(tmp_path))


def test_the_stored_words_are_the_truth(run):
    assert config_of(run) == compose_config(["stage=sft", "seed=7"])
    assert not (run / ".hydra" / "history").exists()


def test_words_on_top_count_and_stay(run):
    assert config_of(run, "train.max_steps=50", "schedule=linear").train.max_steps == 50
    again = config_of(run)
    assert again.train.max_steps == 50 and again.schedule.name == "linear" and again.seed == 7
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == ["stage=sft", "seed=7", "train.max_steps=50", "schedule=linear"]
    assert yaml.safe_load((run / ".hydra" / "history" / "000" / "overrides.yaml").read_text()) == ["stage=sft", "seed=7"]


def test_words_the_run_refuses_leave_its_folder_as_it_was(run):
    before = {path.name: path.read_bytes() for path in (run / ".hydra").glob("*.yaml")}
    with pytest.raises(ValueError), resume.persisting_overrides(resume.plan_resume(run, ["seed=8"])):
        raise UserError("this run is not the one", "seed", "resume with the stored words")
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
    path.write_text(path.read_text().replace(str(REPO_ROOT), "${repo:}"))
    assert config_of(run) == compose_config(["stage=sft", "seed=7"])


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


def test_a_word_said_again_is_said_once(run):
    config_of(run, "train.max_steps=50")
    config_of(run, "train.max_steps=60")
    assert yaml.safe_load((run / ".hydra" / "overrides.yaml").read_text()) == ["stage=sft", "seed=7", "train.max_steps=60"]


def test_another_choice_drops_the_words_said_for_the_former_and_says_so(run):
    config_of(run, "schedule.min_lr_ratio=0.5", "optimizer.weight_decay=0.3")
    plan = resume.plan_resume(run, ["schedule=linear", "schedule.warmup_steps=3"])
    assert plan.config.schedule == compose_config(["stage=sft", "schedule=linear", "schedule.warmup_steps=3"]).schedule
    assert plan.config.optimizer.weight_decay == 0.3 and not [word for word in plan.words if "min_lr_ratio" in word]
    assert plan.said == ["schedule.min_lr_ratio=0.5 was said for the former schedule: dropped"]


def test_another_choice_is_what_a_new_run_with_these_words_would_have(run):
    """The stage's own words for the optimizer stand above the optimizer's file, now as at the beginning."""
    assert config_of(run, "optimizer=adamw") == compose_config(["stage=sft", "seed=7", "optimizer=adamw"])


def test_a_choice_comes_from_the_run_s_own_copy_first_and_stays_there(run):
    own = run / config_snapshot.SNAPSHOT_DIR / "schedule"
    (own / "cosine.yaml").write_text((own / "cosine.yaml").read_text().replace("min_lr_ratio: 0.1", "min_lr_ratio: 0.7"))
    (own / "gone.yaml").write_text((own / "cosine.yaml").read_text().replace("0.7", "0.6"))
    assert config_of(run, "schedule=cosine").schedule.min_lr_ratio == 0.7
    assert config_of(run, "schedule=gone").schedule.min_lr_ratio == 0.6
    assert config_of(run, "schedule=linear").schedule.name == "linear" and (own / "linear.yaml").is_file()


def test_a_choice_that_is_refused_inside_leaves_nothing_behind(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError), resume.persisting_overrides(resume.plan_resume(run, ["optimizer=adamw"])):
        raise UserError("this run is not the one", "optimizer.name", "resume with the stored words")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_words_that_repeat_what_is_there_are_no_news(run):
    assert not resume.plan_resume(run, ["seed=7"]).news and resume.plan_resume(run, ["train.max_steps=5"]).news


def test_a_word_newer_than_the_run_gets_today_s_value_and_that_is_said(run):
    path = run / ".hydra" / "config.yaml"
    stored = yaml.safe_load(path.read_text())
    del stored["train"]["keep_every"]
    path.write_text(yaml.safe_dump(stored))
    plan = resume.plan_resume(run, [])
    assert plan.config == compose_config(["stage=sft", "seed=7"]) and plan.said == ["train.keep_every=0 is of conf/: the word is newer than the run"]
    with pytest.raises(ValueError, match="no value yet"):  # of a run that never began the file may be torn
        resume.plan_resume(run, [], begun=False)


def test_a_word_the_program_no_longer_knows_is_refused_with_the_program_that_did(run):
    path = run / ".hydra" / "config.yaml"
    path.write_text(path.read_text() + "momentum_of_old: 3\n")
    with pytest.raises(ValueError) as refusal:
        config_of(run)
    assert "momentum_of_old" in refusal.value.args[1] and "git checkout abc123" in refusal.value.args[2]


@pytest.mark.parametrize("word", ["hydra.run.dir=/elsewhere", "hydra/launcher=basic", "+seed=3", "~seed", "optimizer=nothing", "${oc.env:HOME}=1"])
def test_words_that_cannot_go_with_a_run_are_refused(run, word):
    with pytest.raises(ValueError) as refusal:
        config_of(run, word)
    assert len(refusal.value.args) == 3


def test_words_of_hydra_among_the_stored_ones_are_not_heard(run):
    path = run / ".hydra" / "overrides.yaml"
    path.write_text(yaml.safe_dump([*yaml.safe_load(path.read_text()), "hydra.searchpath=[file:///nowhere]", "+hydra.callbacks.x._target_=os.system"]))
    assert config_of(run, "schedule=linear").schedule.name == "linear"
    assert "hydra" not in path.read_text()


def test_a_run_is_found_in_a_sweep_and_a_file_of_the_sweep_means_the_sweep(run, tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "report.html").touch()
    assert resolve.resolve_run(str(run / ".hydra" / "config.yaml")) == run
    assert resolve.resolve_run(str(tmp_path)) == resolve.resolve_run(str(tmp_path / "report.html")) == tmp_path and resolve.is_sweep_dir(tmp_path)


def test_last_is_the_run_that_began_last_whatever_was_written_since(run, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "REPO_ROOT", tmp_path)
    single, job = tmp_path / "outputs" / "day" / "time", tmp_path / "outputs" / "multirun" / "day" / "time" / "seed=1"
    for folder, began in ((job, "2026-01-02T00:00:00+00:00"), (single, "2026-01-01T00:00:00+00:00")):
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"started": began}))
    assert resolve.resolve_run("last") == job


def test_a_run_is_not_started_inside_another_nor_over_a_sweep(run, tmp_path):
    with pytest.raises(ValueError, match="inside a run"):
        resolve.check_not_inside_run(run / "checkpoints" / "new")
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a sweep"):
        resolve.check_not_inside_run(tmp_path)
    with pytest.raises(ValueError, match="inside a sweep"):
        resolve.check_not_inside_run(tmp_path / "seed=3")  # where a job of it may still have to go
