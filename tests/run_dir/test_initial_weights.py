"""init_from: a path, the newest completed run of the previous stage, or random weights with a warning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.tokenize.origin import SAMPLE_TOKENIZER
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.run_dir.initial_weights import compatibility_fingerprints, resolve_init_from


@pytest.fixture(scope="module")
def sft() -> Config:
    return compose_config(["stage=sft"])


@pytest.fixture
def day(workspace: Path) -> Path:
    return workspace / "outputs" / "2026-11-21"


def write_run(folder: Path, fingerprints: dict[str, str], ended: str, stage: str = "pretrain", status: str = "completed") -> str:
    (folder / "model").mkdir(parents=True)
    fields = {"status": status, "stage": stage, "fingerprints": fingerprints, "ended": f"2026-11-21T{ended}+00:00"}
    (folder / "run.json").write_text(json.dumps(fields))
    return str(folder)


def resolved(config: Config, day: Path) -> str:
    return resolve_init_from(config, day / "now", compatibility_fingerprints(config))


def test_auto_takes_the_newest_completed_run_of_the_previous_stage(sft: Config, day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fingerprints = compatibility_fingerprints(sft)
    write_run(day / "10-00-00", fingerprints, "10:05:00")
    newest = write_run(day / "10-01-00", fingerprints, "10:09:00")
    write_run(day / "10-02-00", fingerprints, "10:07:00")  # started later, completed earlier
    write_run(day / "10-03-00", fingerprints, "10:11:00", status="failed")
    write_run(day / "10-04-00", fingerprints, "10:12:00", stage="sft")
    write_run(day / "10-06-00", {**fingerprints, "model": "another"}, "10:14:00")
    (day / "10-07-00").mkdir()
    (day / "10-07-00" / "run.json").write_text("torn {")
    assert resolved(sft, day) == newest
    assert newest in capsys.readouterr().err


def test_auto_takes_a_run_of_any_tokenizer_unless_one_is_typed(sft: Config, day: Path) -> None:
    typed = dataclasses.replace(sft, data=dataclasses.replace(sft.data, tokenizer=str(SAMPLE_TOKENIZER)))
    same = write_run(day / "10-00-00", compatibility_fingerprints(typed), "10:05:00")
    another = write_run(day / "10-01-00", {**compatibility_fingerprints(sft), "tokenizer": "another"}, "10:09:00")
    assert (resolved(sft, day), resolved(typed, day)) == (another, same)


def test_auto_finds_jobs_of_a_sweep(sft: Config, day: Path) -> None:
    job = write_run(day.parent / "multirun" / "2026-11-21" / "10-00-00" / "optimizer.lr=0.1", compatibility_fingerprints(sft), "10:05:00")
    assert resolved(sft, day) == job


def test_auto_without_a_run_starts_from_random_weights_with_a_warning(sft: Config, day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(sft, day) == "scratch"
    assert "random weights" in capsys.readouterr().err


def test_first_stage_starts_from_random_weights_without_a_warning(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resolved(compose_config([]), day) == "scratch"
    assert capsys.readouterr().err == ""


def test_scratch_ignores_completed_runs(sft: Config, day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(day / "10-00-00", compatibility_fingerprints(sft), "10:05:00")
    assert resolved(dataclasses.replace(sft, init_from="scratch"), day) == "scratch" and capsys.readouterr().err == ""


def test_missing_path_is_refused_with_the_nearest_name(sft: Config, day: Path, tmp_path: Path) -> None:
    (tmp_path / "pretrain_512.pth").touch()
    with pytest.raises(UserError) as error:
        resolved(dataclasses.replace(sft, init_from=str(tmp_path / "pretrain_521.pth")), day)
    assert str(tmp_path / "pretrain_512.pth") in error.value.fix


def test_fingerprint_depends_on_the_shape_of_the_weights_only(sft: Config) -> None:
    def fingerprint(**changes: object) -> str:
        return compatibility_fingerprints(dataclasses.replace(sft, model=dataclasses.replace(sft.model, **changes)))["model"]

    assert fingerprint() == fingerprint(dropout=0.1, attention="math", name="other") != fingerprint(num_hidden_layers=5)
