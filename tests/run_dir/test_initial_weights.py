"""Where first weights come from: what is named, else the newest finished run of the stage before, else random with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.run_dir import initial_weights


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(initial_weights, "REPO_ROOT", tmp_path)
    return tmp_path / "outputs"


def finished(folder: Path, shared: dict[str, str], ended: str, stage: str = "pretrain", status: str = "completed") -> str:
    (folder / "model").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"status": status, "stage": stage, "fingerprints": shared, "ended": f"2026-11-21T{ended}+00:00"}))
    return str(folder)


def resolved(config: Config, outputs: Path) -> str:
    return initial_weights.resolve_init_from(config, outputs / "2026-11-21" / "now", initial_weights.compatibility_fingerprints(config))


def test_auto_takes_the_newest_finished_run_of_the_stage_before(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft = compose_config(["stage=sft"])
    shared = initial_weights.compatibility_fingerprints(sft)
    day = outputs / "2026-11-21"
    finished(day / "10-00-00", shared, "10:05:00")
    newest = finished(day / "10-01-00", shared, "10:09:00")
    finished(day / "10-02-00", shared, "10:07:00")  # begun later, done earlier
    finished(day / "10-03-00", shared, "10:11:00", status="failed")
    finished(day / "10-04-00", shared, "10:12:00", stage="sft")
    finished(day / "10-05-00", {**shared, "tokenizer": "another"}, "10:13:00")
    finished(day / "10-06-00", {**shared, "model": "another"}, "10:14:00")
    (day / "10-07-00").mkdir()
    (day / "10-07-00" / "run.json").write_text("torn {")
    assert resolved(sft, outputs) == newest
    assert newest in capsys.readouterr().err


def test_auto_finds_jobs_of_a_sweep(outputs: Path) -> None:
    sft = compose_config(["stage=sft"])
    job = finished(outputs / "multirun" / "2026-11-21" / "10-00-00" / "optimizer.lr=0.1", initial_weights.compatibility_fingerprints(sft), "10:05:00")
    assert resolved(sft, outputs) == job


def test_where_auto_finds_nothing_the_run_starts_at_random_and_says_so(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(compose_config(["stage=sft"]), outputs) == "scratch"
    assert "random weights" in capsys.readouterr().err


def test_the_first_stage_starts_at_random_without_a_warning(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(compose_config([]), outputs) == "scratch"
    assert capsys.readouterr().err == ""


def test_scratch_is_taken_at_its_word(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sft = compose_config(["stage=sft", "init_from=scratch"])
    finished(outputs / "2026-11-21" / "10-00-00", initial_weights.compatibility_fingerprints(sft), "10:05:00")
    assert resolved(sft, outputs) == "scratch" and capsys.readouterr().err == ""


def test_a_place_that_is_not_there_is_refused_with_the_nearest_one(outputs: Path, tmp_path: Path) -> None:
    (tmp_path / "pretrain_512.pth").touch()
    with pytest.raises(ValueError) as caught:
        resolved(compose_config([f"init_from={tmp_path / 'pretrain_521.pth'}"]), outputs)
    assert isinstance(caught.value, UserError) and str(tmp_path / "pretrain_512.pth") in caught.value.args[2]


def test_what_changes_no_weight_s_shape_does_not_part_two_models() -> None:
    one = initial_weights.compatibility_fingerprints(compose_config(["model=tiny"]))
    assert one == initial_weights.compatibility_fingerprints(compose_config(["model=tiny", "model.dropout=0.1", "model.attention=math", "model.name=other"]))
    assert one != initial_weights.compatibility_fingerprints(compose_config(["model=tiny", "model.num_hidden_layers=5"]))
