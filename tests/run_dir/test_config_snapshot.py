"""A run's own copy of conf/: complete, first come first kept, and read as data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from common.paths import CONF_DIR
from runner.config.compose import compose_config, source_files
from runner.run_dir import config_snapshot, resume

WORDS = ["stage=sft", "schedule=linear"]


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taken")
    config_snapshot.save_snapshot(folder, WORDS)
    return folder


@pytest.fixture
def kept(taken: Path, tmp_path: Path) -> Path:
    """A folder with the copy of WORDS; returns where the copy lies."""
    return Path(shutil.copytree(taken, tmp_path / "run")) / config_snapshot.SNAPSHOT_DIR


def test_the_copy_holds_what_the_words_are_composed_from_and_nothing_else(kept: Path) -> None:
    names = {str(path.relative_to(kept)) for path in kept.rglob("*.yaml")}
    assert {"config.yaml", "stage/sft.yaml", "data/sft.yaml", "data/base/rows.yaml", "schedule/linear.yaml", "optimizer/muon.yaml"} <= names
    assert names == set(source_files(WORDS)) and not {"stage/pretrain.yaml", "data/pretrain.yaml", "schedule/cosine.yaml"} & names
    assert all((kept / name).read_bytes() == (CONF_DIR / name).read_bytes() for name in names)
    assert config_snapshot.changed_files(kept.parents[1]) == []


def test_the_words_composed_from_the_copy_are_what_they_were(kept: Path) -> None:
    with config_snapshot.as_config_dir(kept.parents[1]) as conf:
        from runner.config.compose import compose_with_run_dir

        assert compose_with_run_dir(WORDS, conf)[0] == compose_config(WORDS)


def test_a_copy_is_not_changed_by_what_comes_later(kept: Path) -> None:
    (kept / "schedule" / "linear.yaml").write_text("name: linear\n")
    new = config_snapshot.extend_snapshot(kept.parents[1], [*WORDS, "optimizer=adamw"], CONF_DIR)
    assert new == [kept / "optimizer" / "adamw.yaml"] and (kept / "schedule" / "linear.yaml").read_text() == "name: linear\n"


def test_a_run_that_begins_does_not_believe_the_copy_of_a_launch_that_came_to_nothing(kept: Path) -> None:
    (kept / "schedule" / "linear.yaml").write_text("name: stale\n")
    config_snapshot.save_snapshot(kept.parents[1], ["stage=sft"])
    assert not (kept / "schedule" / "linear.yaml").exists() and (kept / "schedule" / "cosine.yaml").is_file()


def test_a_difference_names_the_file_and_the_words_and_a_comment_is_none(kept: Path) -> None:
    linear = kept / "schedule" / "linear.yaml"
    linear.write_text("# as it was\n" + linear.read_text())
    assert config_snapshot.changed_files(kept.parents[1]) == []
    linear.write_text(linear.read_text().replace("min_lr_ratio: ", "min_lr_ratio: 1"))
    (kept / "schedule" / "gone.yaml").write_text("name: gone\n")
    gone, changed = config_snapshot.changed_files(kept.parents[1])
    assert "conf/schedule/gone.yaml is gone" in gone and "conf/schedule/linear.yaml has changed since (min_lr_ratio)" in changed


def test_what_the_copy_says_to_hydra_is_not_heard(kept: Path) -> None:
    tree = yaml.safe_load((kept / "config.yaml").read_text())
    tree["hydra"]["searchpath"] = ["file:///nowhere"]
    tree["hydra"]["run"]["dir"] = "/nowhere"
    tree["defaults"] = ["hydra/hydra_logging: nowhere", {"override hydra/launcher": "nowhere"}, {"optional model@hydra.callbacks": "tiny"}, *tree["defaults"]]
    (kept / "config.yaml").write_text(yaml.safe_dump(tree))
    with config_snapshot.as_config_dir(kept.parents[1]) as conf:
        assert "nowhere" not in (conf / "config.yaml").read_text() and "callbacks" not in (conf / "config.yaml").read_text()


BAD = {
    "code": "x: {_target_: os.system, command: touch hacked}",
    "code in a list": "x: [{deep: {_target_: os.system}}]",
    "a tag": "!!python/object/apply:os.system ['touch hacked']",
    "the package of hydra": "# @package hydra.callbacks\nx: 1",
    "a file found by looking elsewhere": "defaults: [{model: '${oc.env:HOME}'}]",
    "a file outside": "defaults: [../../../secret]",
    "references that grow": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "too deep": "[" * 3_000,
    "no mapping": "- 1",
    "too long": "#" * (2 << 20),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_copy_that_is_none_of_ours_is_refused_and_nothing_in_it_is_run(kept: Path, text: str) -> None:
    (kept / "schedule" / "linear.yaml").write_text(text)
    for read in (config_snapshot.changed_files, lambda folder: config_snapshot.as_config_dir(folder).__enter__()):
        with pytest.raises(ValueError) as refusal:
            read(kept.parents[1])
        assert len(refusal.value.args) == 3 and "linear.yaml" in refusal.value.args[1]
    assert not list(Path.cwd().glob("hacked"))


def test_links_pipes_and_strange_names_in_the_copy_are_refused(kept: Path) -> None:
    for make in (lambda at: at.symlink_to("/etc/hostname"), os.mkfifo, lambda at: at.mkdir()):
        make(kept / "schedule" / "strange.yaml")
        with pytest.raises(ValueError, match="copy of conf/"):
            config_snapshot.changed_files(kept.parents[1])
        (kept / "schedule" / "strange.yaml").rmdir() if (kept / "schedule" / "strange.yaml").is_dir() else (kept / "schedule" / "strange.yaml").unlink()
    (kept / "a b\n.yaml").touch()
    with pytest.raises(ValueError, match="none of ours"):
        config_snapshot.changed_files(kept.parents[1])


def test_values_that_the_environment_gave_are_written_down_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.config.compose import compose_tree

    monkeypatch.setenv("DATA", "/somewhere")
    (tmp_path / ".hydra").mkdir()
    tree = compose_tree(["data.val_path='${oc.env:DATA}/x.jsonl'", "schedule.warmup_steps='${train.log_every}'"])
    resume.freeze_saved_config(tmp_path, _without_hydra(tree))
    config = yaml.safe_load((tmp_path / ".hydra" / "config.yaml").read_text())
    assert config["data"]["val_path"] == "/somewhere/x.jsonl" and config["schedule"]["warmup_steps"] == 10
    assert config["data"]["tokenizer"].startswith("${repo:}"), "what belongs to the repository follows it"


def _without_hydra(tree):  # as Hydra hands it to the app
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(tree, [key for key in tree if key != "hydra"])
