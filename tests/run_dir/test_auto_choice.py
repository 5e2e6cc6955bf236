"""init_from=auto among several runs: the best job of the newest sweep, and a warning about a better run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.launch.initial_weights import compatibility_fingerprints, resolve_init_from

EVALUATION = {"on": "validation", "rows": 80, "tokens": 90, "data": "a", "tokenizer": "t", "loss": {}}


@pytest.fixture(scope="module")
def sft() -> Config:
    return compose_config(["stage=sft"])


def write_run(folder: Path, config: Config, ended: str, loss: float) -> str:
    (folder / "model").mkdir(parents=True)
    fields = {
        "status": "completed",
        "stage": "pretrain",
        "fingerprints": compatibility_fingerprints(config),
        "ended": f"2026-11-21T{ended}+00:00",
    }
    fields |= {
        "step": 4,
        "tokens": 100,
        "metrics": {"loss": loss},
        "export": {"weights": "best", "step": 4, "loss": loss},
        "evaluation": EVALUATION,
    }
    (folder / "run.json").write_text(json.dumps(fields))
    return str(folder)


def resolved(config: Config, day: Path) -> str:
    return resolve_init_from(config, day / "now")


def test_auto_takes_the_best_job_of_the_newest_sweep(sft: Config, workspace: Path) -> None:
    sweep = workspace / "outputs" / "multirun" / "2026-11-21" / "10-00-00"
    losses = {"optimizer.lr=1": 1.5, "optimizer.lr=2": 1.0, "optimizer.lr=3": 2.0}  # the last one ended last
    for number, (name, loss) in enumerate(losses.items()):
        write_run(sweep / name, sft, f"10:0{number}:00", loss)
    jobs = [{"name": name, "overrides": {"optimizer.lr": name[-1]}} for name in losses]
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert resolved(sft, workspace / "outputs" / "2026-11-21") == str(sweep / "optimizer.lr=2")


@pytest.mark.parametrize("loss, is_better", [(1.0, True), (3.0, False)])
def test_auto_warns_about_a_run_with_a_lower_loss_than_the_newest(
    sft: Config, workspace: Path, capsys: pytest.CaptureFixture[str], loss: float, is_better: bool
) -> None:
    day = workspace / "outputs" / "2026-11-21"
    other, newest = (
        write_run(day / "10-00-00", sft, "10:05:00", loss),
        write_run(day / "10-01-00", sft, "10:09:00", 2.0),
    )
    assert resolved(sft, day) == newest
    assert (f"there is a better run: init_from={other}" in capsys.readouterr().err) == is_better


@pytest.mark.parametrize(
    "damage", [{"fingerprints": []}, {"fingerprints": {"model": [1]}}, {"tokens": "x"}, {"step": None}]
)
def test_auto_passes_over_a_run_whose_fields_have_other_types(sft: Config, workspace: Path, damage: dict) -> None:
    """A run.json that somebody edited ended every later init_from=auto with a traceback."""
    day = workspace / "outputs" / "2026-11-21"
    sound, damaged = (
        write_run(day / "10-00-00", sft, "10:05:00", 1.0),
        Path(write_run(day / "10-01-00", sft, "10:09:00", 2.0)),
    )
    (damaged / "run.json").write_text(json.dumps(json.loads((damaged / "run.json").read_text()) | damage))
    assert resolved(sft, day) == sound
