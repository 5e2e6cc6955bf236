"""sweep.seeds: rounds of seeds for the best points of a sweep, until they differ by more than chance."""

import json
from collections import Counter
from pathlib import Path

import pytest
from fake_jobs import FakeJobs, read_sweep

from common.errors import UserError
from runner.planning.starts import planned_start

LR = "optimizer.lr"
RATES = f"{LR}=0.1,0.2,0.3,0.4"
# validation losses by lr and number of the seed; 42 is the first, and in no name
TRAINS = """
parts = dict(part.split("=") for part in os.path.basename(run_dir).split(","))
known = json.load(open(os.path.join(os.path.dirname(__file__), "losses.json")))
losses, seed = known["losses"][parts["optimizer.lr"]], int(parts.get("seed", 42)) - 42
if seed == known["killed"] and fields["attempt"] == 1: os.kill(os.getpid(), 9)
loss, evaluation = losses[seed % len(losses)], {"on": "validation", "rows": known["rows"]}
write("completed", "completed", metrics={"val_loss": loss, "best_val_loss": loss}, evaluation=evaluation)
"""
APART = {"0.1": [3.0], "0.2": [2.0, 2.3, 2.1], "0.3": [1.0, 1.2, 1.1], "0.4": [4.0]}
EQUAL = {"0.1": [3.0], "0.2": [2.0, 2.1, 2.2], "0.3": [2.2, 2.1, 2.0], "0.4": [4.0]}


def set_losses(jobs: FakeJobs, losses: dict[str, list[float]], rows: int = 100, killed: int | None = None) -> None:
    known = {"losses": losses, "rows": rows, "killed": killed}
    (jobs.script.parent / "losses.json").write_text(json.dumps(known))
    jobs.set(default=TRAINS)


def seeds_of(folder: Path) -> list[int]:
    """Return the number of completed seeds of each rate."""
    jobs = read_sweep(folder / "sweep")["jobs"]
    counts = Counter(job["overrides"][LR] for job in jobs if job["status"] == "completed")
    return [counts[rate] for rate in ("0.1", "0.2", "0.3", "0.4")]


@pytest.mark.slow
def test_seeds_end_where_the_best_points_differ(fake_jobs: FakeJobs, sweep, tmp_path: Path) -> None:
    set_losses(fake_jobs, APART)
    assert sweep(RATES, "sweep.seeds=5", "sweep.top=2") == 0
    assert seeds_of(tmp_path) == [1, 3, 3, 1]


@pytest.mark.slow
def test_seeds_end_at_their_number_where_points_are_equal(fake_jobs: FakeJobs, sweep, tmp_path: Path) -> None:
    set_losses(fake_jobs, EQUAL)
    assert sweep(RATES, "sweep.seeds=4", "sweep.top=2", "hydra.launcher.workers=2") == 0
    assert seeds_of(tmp_path) == [1, 4, 4, 1]
    seeds = {job["overrides"].get("seed") for job in read_sweep(tmp_path / "sweep")["jobs"]}
    assert seeds == {None, "43", "44", "45"}


@pytest.mark.slow
def test_seeds_that_are_swept_count(fake_jobs: FakeJobs, sweep, resume, tmp_path: Path) -> None:
    set_losses(fake_jobs, EQUAL)
    assert sweep(f"{LR}=0.2,0.3", "seed=42,43") == 0
    assert seeds_of(tmp_path) == [0, 2, 2, 0]
    assert resume("sweep.seeds=3") == 0
    assert seeds_of(tmp_path) == [0, 3, 3, 0]
    assert resume("sweep.seeds=3") == 0, "asked again"
    assert seeds_of(tmp_path) == [0, 3, 3, 0]


@pytest.mark.slow
def test_plan_has_the_next_round_of_seeds(fake_jobs: FakeJobs, sweep, resume, tmp_path: Path) -> None:
    set_losses(fake_jobs, EQUAL)
    assert sweep(f"{LR}=0.2,0.3") == 0
    before = (tmp_path / "sweep" / "sweep.json").read_bytes()
    runs = planned_start([f"resume={tmp_path / 'sweep'}", "sweep.seeds=3"], {}).runs
    assert sorted((run.config.optimizer.lr, run.config.seed) for run in runs) == [(0.2, 43), (0.3, 43)]
    assert (tmp_path / "sweep" / "sweep.json").read_bytes() == before
    assert resume("sweep.seeds=3") == 0
    with pytest.raises(UserError, match="no job of this sweep has to run"):
        planned_start([f"resume={tmp_path / 'sweep'}", "sweep.seeds=3"], {})


@pytest.mark.slow
def test_seed_that_is_killed_is_resumed(fake_jobs: FakeJobs, sweep, resume, tmp_path: Path) -> None:
    set_losses(fake_jobs, EQUAL, killed=2)
    assert sweep(RATES, "sweep.seeds=4", "sweep.top=2") == 1
    assert seeds_of(tmp_path) == [1, 2, 2, 1]
    assert resume() == 0
    assert seeds_of(tmp_path) == [1, 4, 4, 1]


@pytest.mark.slow
def test_seeds_are_not_added_on_tiny_validation_data(
    fake_jobs: FakeJobs, sweep, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_losses(fake_jobs, EQUAL, rows=3)
    assert sweep(RATES, "sweep.seeds=4") == 0
    assert seeds_of(tmp_path) == [1, 1, 1, 1]
    assert "no seeds are added: the jobs were judged on 3 rows" in capfd.readouterr().err


@pytest.mark.parametrize("setting", ["sweep.seeds=-1", "sweep.seeds=1", "sweep.top=1"])
def test_settings_of_seeds_have_limits(sweep, setting: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="at least 2"):
        sweep(RATES, setting)
