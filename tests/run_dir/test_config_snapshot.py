"""The run's copy of conf/: complete, never overwritten, and read as data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from common.errors import UserError
from common.paths import CONF_DIR, REPO_ROOT
from runner.config import snapshot
from runner.config.compose import compose_config, compose_tree, source_files, to_config, without_hydra
from runner.run_dir import saved_config

TYPED = ["stage=sft", "schedule=linear"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    snapshot.save_snapshot(folder, TYPED)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A run directory with the copies of TYPED."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def copies(run: Path) -> Path:
    return run / snapshot.SNAPSHOT_DIR


def test_snapshot_holds_exactly_the_source_files(run: Path, copies: Path) -> None:
    names = {str(path.relative_to(copies)) for path in copies.rglob("*.yaml")}
    assert names == set(source_files(TYPED))
    assert all((copies / name).read_bytes() == (CONF_DIR / name).read_bytes() for name in names)
    assert snapshot.changed_files(run) == []


def test_freeze_values_keeps_what_is_written_of_unchanged_paths_only() -> None:
    """A resume may replace ${repo:}/data by /data, or the other way round."""
    below = {name: f"${{repo:}}/{name}" for name in "abc"}
    resolved = {"a": f"{REPO_ROOT}/a", "b": "/b", "c": f"{REPO_ROOT}/c"}
    assert saved_config.freeze_values(resolved, below) == {"a": "${repo:}/a", "b": "/b", "c": "${repo:}/c"}
    assert saved_config.freeze_values(resolved, {"a": "/a", "b": None, "c": f"{REPO_ROOT}/c"}) == resolved


@pytest.mark.slow
def test_snapshot_composes_to_the_same_config(run: Path) -> None:
    with snapshot.as_config_dir(run) as conf:
        assert to_config(without_hydra(compose_tree(TYPED, conf))) == compose_config(TYPED)


@pytest.mark.slow
def test_snapshot_takes_settings_that_are_newer_from_conf(run: Path, copies: Path) -> None:
    """The next jobs of a sweep that an earlier version began are composed from its copies."""
    content = yaml.safe_load((copies / "config.yaml").read_text())
    del content["run"], content["train"]["keep_every"]
    (copies / "config.yaml").write_text(yaml.safe_dump(content | {"seed": 7}))
    with snapshot.as_config_dir(run) as conf:
        assert to_config(without_hydra(compose_tree(TYPED, conf))) == compose_config([*TYPED, "seed=7"])


def test_extended_snapshot_keeps_the_first_copy_of_a_file(run: Path, copies: Path) -> None:
    (copies / "schedule" / "linear.yaml").write_text("name: linear\n")
    assert snapshot.extend_snapshot(run, [*TYPED, "optimizer=adamw"], CONF_DIR) == [
        copies / "optimizer" / "adamw.yaml",
        copies / "stage" / "lr" / "sft_adamw.yaml",
    ]
    assert (copies / "schedule" / "linear.yaml").read_text() == "name: linear\n"


def test_new_run_replaces_the_copies_of_a_refused_launch(run: Path, copies: Path) -> None:
    (copies / "schedule" / "linear.yaml").write_text("name: stale\n")
    snapshot.save_snapshot(run, ["stage=sft"])
    assert not (copies / "schedule" / "linear.yaml").exists() and (copies / "schedule" / "cosine.yaml").is_file()


def test_changed_files_are_named_with_their_keys_and_comments_do_not_count(run: Path, copies: Path) -> None:
    linear = copies / "schedule" / "linear.yaml"
    linear.write_text("# a comment\n" + linear.read_text())
    assert snapshot.changed_files(run) == []
    linear.write_text(linear.read_text().replace("min_lr_ratio: ", "min_lr_ratio: 1"))
    (copies / "schedule" / "gone.yaml").write_text("name: gone\n")
    gone, changed = snapshot.changed_files(run)
    assert (
        "conf/schedule/gone.yaml is not in conf/" in gone
        and "conf/schedule/linear.yaml has changed (min_lr_ratio)" in changed
    )


def test_settings_of_hydra_in_the_copy_are_ignored(run: Path, copies: Path) -> None:
    tree = yaml.safe_load((copies / "config.yaml").read_text())
    tree["hydra"]["searchpath"] = ["file:///nowhere"]
    tree["hydra"]["run"]["dir"] = "/nowhere"
    tree["defaults"] = [
        "hydra/hydra_logging: nowhere",
        {"override hydra/launcher": "nowhere"},
        {"optional model@hydra.callbacks": "tiny"},
        *tree["defaults"],
    ]
    (copies / "config.yaml").write_text(yaml.safe_dump(tree))
    with snapshot.as_config_dir(run) as conf:
        composed = yaml.safe_load((conf / "config.yaml").read_text())
    assert "nowhere" not in str(composed) and "hydra.callbacks" not in str(composed)


INVALID = {
    "code": "x: {_target_: os.system, command: touch hacked}",
    "code in a list": "x: [{deep: {_target_: os.system}}]",
    "YAML tag": "!!python/object/apply:os.system ['touch hacked']",
    "package of hydra": "# @package hydra.callbacks\nx: 1",
    "interpolated default": "defaults: [{model: '${oc.env:HOME}'}]",
    "default outside": "defaults: [../../../secret]",
    "growing aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
    "too deep": "[" * 600 + "]" * 600,
    "no mapping": "- 1",
    "too long": "#" * (2 << 20),
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_invalid_copy_is_refused_and_nothing_in_it_is_executed(
    run: Path, copies: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    (copies / "schedule" / "linear.yaml").write_text(text)
    for read in (snapshot.changed_files, lambda folder: snapshot.as_config_dir(folder).__enter__()):
        with pytest.raises(UserError) as error:
            read(run)
        assert "linear.yaml" in error.value.setting
    assert not (run / "hacked").exists()


def test_links_pipes_and_odd_names_in_the_copy_are_refused(run: Path, copies: Path) -> None:
    odd = copies / "schedule" / "odd.yaml"
    for create, remove in (
        (lambda: odd.symlink_to("/etc/hostname"), odd.unlink),
        (lambda: os.mkfifo(odd), odd.unlink),
        (odd.mkdir, odd.rmdir),
    ):
        create()
        with pytest.raises(UserError, match="copy of conf/"):
            snapshot.changed_files(run)
        remove()
    (copies / "a b\n.yaml").touch()
    with pytest.raises(UserError, match="not written by this program"):
        snapshot.changed_files(run)


def test_interpolations_are_saved_as_the_values_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/somewhere")
    (tmp_path / ".hydra").mkdir()
    typed = ["schedule.warmup_steps='${train.log_every}'"]
    tree = without_hydra(compose_tree(typed))
    tree.data.val_path = "${oc.env:DATA}/x.jsonl"  # of a YAML file
    snapshot.complete_hydra_dir(tmp_path, tree, typed)
    config = yaml.safe_load((tmp_path / ".hydra" / "config.yaml").read_text())
    assert config["data"]["val_path"] == "/somewhere/x.jsonl" and config["schedule"]["warmup_steps"] == 10
    assert config["data"]["path"].startswith("${repo:}"), "paths of the repository follow the checkout"
