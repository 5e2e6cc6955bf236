"""sweep.budget: what a sweep does until its budget is spent, and which length it gives its jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_fixtures import Call, Program, is_user_error
from fake_jobs import FakeJobs, read_sweep

from common.errors import UserError
from runner.planning.planned_settings import as_override, in_tokens, mean_cost
from runner.planning.starts import planned_start
from runner.reporting.read_sweep import read_sweep_results
from runner.run_dir.best_job import find_best_job
from runner.sweep.seeds import Budget

# 16 steps of 100 tokens, an evaluation at every second one; the loss is lowest at lr=BEST, and falls with the steps
JOB = """
import math
values = dict(each.split("=") for each in [*overrides, *os.path.basename(run_dir).split(",")])
loss, end = abs(math.log(float(values["optimizer.lr"]) / BEST)), int(float(values.get("train.stop_at", 0)) * 16) or 16
known = dict(attempts=[{"total_steps": 16}], evaluation={"on": "validation", "rows": 50})
write("running", **known)
def save(*_):
    write("interrupted", "interrupted", step=step); sys.exit(75)
signal.signal(signal.SIGTERM, save)
for step in range(fields["step"] + 1, end + 1):
    if step % 2 == 0:
        with open("metrics.jsonl", "a") as file:
            record = {"kind": "eval", "step": step, "loss": loss + 1 / step, "tokens": 100 * step}
            file.write(json.dumps(record) + chr(10))
    WAIT
known["step"] = end
if end < 16:
    write("interrupted", "paused", **known); sys.exit(75)
os.makedirs("model", exist_ok=True)
write("completed", "completed", export={"weights": "best", "step": 16, "loss": loss}, **known)
"""
WAITS = "while step == 6 and fields['attempt'] == 1: signal.pause()"
RUNGS = ("hydra/sweeper=halving", "train.max_steps=16", "train.eval_every=2")


def set_jobs(jobs: FakeJobs, best: float, waiting: str = "none") -> None:
    script = JOB.replace("BEST", str(best))
    jobs.set_all({"default": script.replace("WAIT", ""), waiting: script.replace("WAIT", WAITS)})


def jobs_of(folder: Path) -> dict[str, tuple[str, int]]:
    """Return (status, attempts) by the name of the job."""
    jobs = read_sweep(folder / "sweep")["jobs"]
    return {job["name"].removeprefix("optimizer.lr="): (job["status"], job["attempt"]) for job in jobs}


@pytest.mark.slow
def test_budget_is_spent_on_seeds_of_the_best_and_can_be_raised(
    fake_jobs: FakeJobs, sweep: Any, resume: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """3,400 tokens: rungs of three points, and the second best one to its end; 1,600: a seed; 600: a part of another."""
    folder, cut = tmp_path / "sweep", "optimizer.lr=0.002,seed=43"
    set_jobs(fake_jobs, best=0.0039, waiting=cut)
    assert sweep(*RUNGS, "optimizer.lr=2e-3,4e-3,8e-3", "sweep.top=2", "sweep.budget=5600tokens") == 0
    expected = {"0.002": ("completed", 2), "0.004": ("completed", 4), "0.008": ("paused", 1)}
    expected |= {"0.004,seed=43": ("completed", 1), "0.002,seed=43": ("paused", 1)}
    assert jobs_of(tmp_path) == expected and read_sweep(folder)["status"] == "completed"
    assert "5.6e+03 tokens of 5.6e+03 tokens spent, 3 jobs trained to their end, 1 of them" in capfd.readouterr().err
    rows = read_sweep_results(folder).rows
    assert [(row.overrides["optimizer.lr"], row.rank, row.status) for row in rows] == [
        ("0.004", 1, "completed"), ("0.002", 2, "completed"), ("0.008", None, "paused"),
    ]  # fmt: skip
    assert find_best_job(folder).name.startswith("optimizer.lr=0.004")
    assert resume() == 0 and jobs_of(tmp_path) == expected, "the budget is spent"
    assert resume("sweep.budget=9000tokens") == 0
    after = jobs_of(tmp_path)
    assert after.pop("0.004,seed=44") == ("completed", 1) and after.pop("0.002,seed=44") == ("completed", 1)
    assert after == expected | {"0.002,seed=43": ("completed", 2)}


@pytest.mark.slow
def test_budget_widens_the_range_whose_edge_is_the_best_value(
    fake_jobs: FakeJobs, sweep: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    set_jobs(fake_jobs, best=0.0006)
    assert sweep(*RUNGS, "optimizer.lr=2e-3,4e-3,8e-3", "sweep.budget=12000tokens", "hydra.launcher.workers=2") == 0
    found = jobs_of(tmp_path)
    assert [name for name in found if "seed" not in name] == ["0.002", "0.004", "0.008", "0.001", "0.0005", "0.00025"]
    assert found["0.0005"][0] == found["0.0005,seed=43"][0] == "completed"
    assert "optimizer.lr=0.001 is added" in capfd.readouterr().err


@pytest.mark.slow
def test_failed_seed_ends_a_budget_with_a_message(
    fake_jobs: FakeJobs, sweep: Any, resume: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, broken = JOB.replace("BEST", "0.0039").replace("WAIT", ""), "optimizer.lr=0.004,seed=43"
    fake_jobs.set_all({"default": script, broken: "sys.exit(1)"})
    assert sweep(*RUNGS, "optimizer.lr=2e-3,4e-3,8e-3", "sweep.top=2", "sweep.budget=9000tokens") == 1
    printed = capfd.readouterr().err
    assert f"no more seeds, as {broken} has failed" in printed
    fake_jobs.set_all({broken: script})
    assert resume() == 0 and jobs_of(tmp_path)["0.004,seed=44"] == ("completed", 1)


@pytest.mark.slow
def test_job_that_a_budget_stops_before_its_rung_is_paused_where_it_is(
    fake_jobs: FakeJobs, sweep: Any, tmp_path: Path
) -> None:
    """800 tokens of one point, and 600 of the other one, which waits there, towards the same rung."""
    set_jobs(fake_jobs, best=0.0039, waiting="optimizer.lr=0.002")
    assert sweep(*RUNGS, "hydra.sweeper.first_rung=0.5", "optimizer.lr=4e-3,2e-3", "sweep.budget=1400tokens") == 0
    row = read_sweep_results(tmp_path / "sweep").rows[-1]
    assert row.overrides["optimizer.lr"] == "0.002" and row.progress == "paused at 3/8"


@pytest.mark.slow
def test_time_of_earlier_launches_counts(fake_jobs: FakeJobs, sweep: Any, resume: Any, tmp_path: Path) -> None:
    set_jobs(fake_jobs, best=0.0039)
    assert sweep(*RUNGS, "optimizer.lr=2e-3,4e-3") == 0
    state = read_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(state | {"spent_seconds": 3600.0}))
    before = jobs_of(tmp_path)
    assert resume("sweep.budget=10s") == 0 and jobs_of(tmp_path) == before
    assert read_sweep(tmp_path / "sweep")["spent_seconds"] > 3600
    with pytest.raises(UserError, match="no job of this sweep has to run") as error:
        planned_start([f"resume={tmp_path / 'sweep'}", "sweep.budget=2h"], {})
    assert "a larger sweep.budget of train.py adds jobs" in error.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("spent", ["nan", -1e12, [1]])
def test_spent_time_of_another_origin_is_refused(
    spent: object, fake_jobs: FakeJobs, sweep: Any, resume: Any, tmp_path: Path
) -> None:
    set_jobs(fake_jobs, best=0.0039)
    assert sweep(*RUNGS, "optimizer.lr=2e-3,4e-3") == 0
    state = read_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(state | {"spent_seconds": spent}))
    with pytest.raises(UserError, match="sweep.json cannot be read"):
        resume("sweep.budget=1h")


REFUSED = {
    "sweep.budget=30": "sweep.budget must be a time, tokens or FLOPs",
    "sweep.budget=1e60h": "sweep.budget must be a time, tokens or FLOPs",
    "sweep.budget=0m": "sweep.budget must be a time, tokens or FLOPs",
    "sweep.budget=1h hydra/sweeper=grid": "by a search that stops the worse points early",
    "sweep.budget=1h sweep.seeds=3": "adds seeds for as long as something is left",
    "sweep.budget=1e15flops": "FLOPs become tokens when a sweep is started",
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.items(), ids=REFUSED)
def test_budget_refuses_what_has_no_meaning(overrides: str, message: str, sweep: Any) -> None:
    with pytest.raises(UserError, match=message):
        sweep(*RUNGS, "optimizer.lr=2e-3,4e-3", *overrides.split())


@pytest.mark.parametrize("text", ["90s", "30m", "1.5h", "2e9tokens", "1e17flops"])
def test_budget_is_written_as_it_is_read(text: str) -> None:
    budget = Budget.parse(text)
    assert 1 <= Budget.parse(as_override(budget)).amount / budget.amount < 1.02


def planned(steps: int, step_seconds: float, active: int = 1000) -> dict[str, Any]:
    seconds = ("first_step_seconds", "eval_seconds", "sample_seconds", "save_seconds")
    return {
        "name": "optimizer.lr=0.1",
        "model": {"active": active},
        "data": {"steps": steps, "padding": 0.5, "run_tokens": steps * 10},
        "time": {**dict.fromkeys(seconds, 1.0), "timed_steps": 3, "step_seconds": step_seconds},
    }


def test_cost_of_a_job_is_the_mean_over_jobs_of_different_steps() -> None:
    """64 steps of 2 s half full are 64 s, 32 of 4 s, too; 10 tokens per step."""
    runs = [planned(64, 2.0), planned(32, 4.0)]
    assert mean_cost(runs, "s", planned_in=56.0) == pytest.approx((2.0 + 0.3 * (56 - 26) / 3, 1.0, 1.0))
    assert mean_cost(runs, "tokens", planned_in=56.0) == pytest.approx((0.0, 0.0, 7.5))
    assert in_tokens(Budget(6e6, "flops"), runs, "6e6flops")[0].amount == pytest.approx(1000)
    assert in_tokens(Budget(6e6 + 8e3, "flops"), runs, "6.008e6flops")[1] == "1001tokens"  # not rounded up
    with pytest.raises(UserError, match="the points have models of 1,000 to 2,000 active parameters"):
        in_tokens(Budget(6e6, "flops"), [*runs, planned(64, 1.0, active=2000)], "6e6flops")


@pytest.mark.slow(long=True)
def test_budget_sets_the_length_of_the_jobs_and_is_kept(warm_program: Program, call: Call, tmp_path: Path) -> None:
    """Half of 31,000 tokens for 1.5 full runs of about 498 tokens per step: 20 steps, an evaluation at each half."""
    data = ["stage=pretrain", "init_from=scratch", "data.max_length=128", "train.batch_size=4", "device=cpu"]
    sizes = ["hidden_size=32", "num_hidden_layers=1", "num_attention_heads=1", "num_key_value_heads=1"]
    typed = [
        *data,
        *(f"model.{size}" for size in sizes),
        *("hydra/sweeper=halving", "hydra.sweeper.first_rung=0.5"),
        "optimizer.lr=1e-3,4e-3",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]
    done = warm_program("--multirun", *typed, "sweep.budget=31000tokens")
    assert done.returncode == 0, done.stderr
    found = read_sweep(tmp_path / "sweep")
    assert {"train.max_steps=20", "train.eval_every=10", "hydra/sweeper=halving"} < {*found["overrides"]}
    tokens = [
        json.loads((tmp_path / "sweep" / job["name"] / "run.json").read_text())["tokens"] for job in found["jobs"]
    ]
    assert 29_000 < sum(tokens) < 90_000  # steps of 10 ms: a busy machine lets many pass before a job is stopped
    printed = warm_program("--multirun", *typed, "sweep.budget=31000tokens", "timing=false", command="plan.py")
    assert printed.returncode == 0 and "train.max_steps=20 train.eval_every=10" in printed.stderr
    refused = warm_program("--multirun", *typed, "sweep.budget=1000tokens")
    assert refused.returncode == 2 and "\nerror: the rungs alone cost about" in refused.stderr
    single = call(*data, "sweep.budget=30m")
    assert is_user_error(single) and "add --multirun" in single.stderr
