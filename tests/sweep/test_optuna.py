"""Points that Optuna chooses (slow: the real one, where it is installed)."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf
from test_external_launchers import TINY, begun, books, installed, until

from runner.sweep import session
from runner.sweep.plugins import external, optuna_sweeper
from runner.sweep.plugins.local import SweepJobFailed

SPACE = ("optimizer.lr=tag(log,interval(1e-4,1e-2))", "train.accumulation_steps=1,2")
RANDOM = ("hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=7")
needs_optuna = pytest.mark.skipif(
    find_spec("optuna") is None or not installed("hydra_optuna_sweeper"), reason=f"Optuna is not installed: {external.SWEEPERS['optuna'][1]}"
)


def trials(sweep: Path) -> list[Any]:
    import optuna

    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{sweep / 'optuna.db'}").get_trials()


def test_more_than_a_loss_is_read_from_the_last_line_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"kind": "train", "tokens_per_second": 5.0}, {"kind": "train", "tokens_per_second": 7.0}, {"kind": "eval", "loss": 3.0}]
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    class Sweep:
        class state:
            folder = tmp_path

        def job_of(self, words: list[str]) -> dict:
            return {"name": words[0]}

    class Starter:
        def launch(self, job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
            return [JobReturn(status=JobStatus.COMPLETED, _return_value=value) for value in (2.5, SweepJobFailed("killed"))]

    monkeypatch.setattr(session, "current_sessions", [Sweep()])
    good, bad = optuna_sweeper.MetricLauncher(Starter(), ["loss", "tokens_per_second"]).launch([["good"], ["bad"]], 0)
    assert good._return_value == [2.5, 7.0] and isinstance(bad._return_value, SweepJobFailed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"objectives": ["loss", "tokens_per_second"]},
        {"direction": ["minimize", "maximize"]},
        {"objectives": [], "direction": []},
        {"direction": "minimise"},
        {"n_trials": 0},
        {"n_jobs": "many"},
    ],
)
def test_what_optuna_would_stumble_over_is_refused(wrong: dict[str, Any]) -> None:
    right = {"objectives": ["loss"], "direction": "minimize", "n_trials": 2, "n_jobs": 1}
    optuna_sweeper.check_optuna_options(right)
    optuna_sweeper.check_optuna_options({**right, "objectives": ["loss", "tokens"], "direction": ["minimize", "maximize"]})
    with pytest.raises(ValueError) as refused:
        optuna_sweeper.check_optuna_options({**right, **wrong})
    assert len(refused.value.args) == 3


@needs_optuna
def test_a_sampler_is_made_of_its_words_and_nothing_else_is() -> None:
    """As Hydra 1.4 hands it over."""
    from hydra_plugins.hydra_optuna_sweeper import config

    for words in (config.TPESamplerConfig, config.RandomSamplerConfig, config.NSGAIISamplerConfig, config.GridSamplerConfig):
        made = optuna_sweeper._make_sampler(OmegaConf.to_container(OmegaConf.structured(words)))
        assert f"{getattr(made, 'func', type(made)).__name__}Config" == words.__name__
    with pytest.raises(KeyError):
        optuna_sweeper._make_sampler({"_target_": "os.system", "command": "true"})


@pytest.mark.slow
@needs_optuna
def test_a_study_that_was_killed_continues_with_its_points_and_its_count(checkout: Path, program: Any, tmp_path: Path) -> None:
    with begun(checkout, tmp_path, *RANDOM, *SPACE, "hydra.sweeper.n_trials=3", "train.max_steps=60", *TINY[1:]) as driver:
        sweep = tmp_path / "sweep"
        until(lambda: (sweep / "sweep.json").exists() and len(found := books(sweep)) == 2 and (sweep / found[1]["name"] / "metrics.jsonl").exists(), driver)
        driver.send_signal(signal.SIGKILL)
    before = [job["name"] for job in books(sweep)]
    again = program("resume=sweep")
    assert again.returncode == 0, again.stderr
    jobs = books(sweep)
    assert [job["name"] for job in jobs[:2]] == before and len(jobs) == 3
    assert [(job["status"], job["attempt"]) for job in jobs] == [("completed", 1), ("completed", 2), ("completed", 1)]
    assert [job["loss"] for job in jobs] == [trial.value for trial in trials(sweep) if trial.value is not None]
    more = program("resume=sweep", "hydra.sweeper.n_trials=4")
    assert more.returncode == 0 and len(books(sweep)) == 4, more.stderr
    assert all(job["attempt"] == 1 for job in books(sweep)[2:])


@pytest.mark.slow
@needs_optuna
def test_a_point_that_diverges_ends_no_study_and_counts_as_infinite(program: Any, tmp_path: Path) -> None:
    ran = program(
        "--multirun", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "optimizer.lr=1e-3,1e30", *TINY, "hydra.sweep.dir=sweep", "hydra.launcher.workers=2", "hydra.sweeper.n_jobs=2"
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    assert sorted((job["overrides"]["optimizer.lr"], job["status"]) for job in books(tmp_path / "sweep")) == [("0.001", "completed"), ("1e+30", "failed")]
    assert sorted(trial.value for trial in trials(tmp_path / "sweep"))[1] == float("inf")


@pytest.mark.slow
@needs_optuna
def test_loss_and_speed_together_have_a_front_and_need_a_direction_each(program: Any, tmp_path: Path) -> None:
    words = ("--multirun", *RANDOM, *SPACE, *TINY, "hydra.sweeper.n_trials=2", "hydra.sweeper.objectives=[loss,tokens_per_second]")
    ran = program(*words, "hydra.sweeper.direction=[minimize,maximize]", "hydra.sweep.dir=sweep")
    assert ran.returncode == 0, ran.stderr
    assert all(len(trial.values) == 2 for trial in trials(tmp_path / "sweep"))
    assert "solutions" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    refused = program(*words, "hydra.sweep.dir=other")
    assert refused.returncode == 2 and "each objective has a direction" in refused.stderr and not (tmp_path / "other").exists()
