"""Successive halving: which point goes on, what the records of jobs say, and sweeps whose jobs are a few lines of Python."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import DIVERGED, HALVED, HALVED_STEPS, KILLED, SAVES, FakeJobs, read_sweep

from common.errors import TrainingError, UserError
from runner.config.compose import compose_config
from runner.reporting.leaderboard import leaderboard_csv
from runner.reporting.read_sweep import read_sweep_results
from runner.sweep.halving import (
    HalvingOptions,
    HalvingSearch,
    describe_cost,
    next_promotion,
    points_that_go_on,
)
from runner.sweep.rungs import read_reached, rung_shares
from runner.sweep.state import SweepState

RUNGS = [0.125, 0.25, 0.5]
HALVING = ("hydra/sweeper=halving", "train.max_steps=16", "train.eval_every=2")
LRS = "optimizer.lr=1e-3,2e-3,3e-3,4e-3,5e-3,6e-3,7e-3,8e-3"


def replay(curves: Sequence[Sequence[float]], workers: int, seed: int) -> tuple[list[list[float]], float]:
    """Return the losses that each point has got, and the full runs that they cost, with jobs of random durations."""
    chance, now, cost, share = random.Random(seed), 0.0, 0.0, [0.0, *RUNGS, 1.0]
    losses: list[list[float]] = [[] for _ in curves]
    new, running, seen = [*range(len(curves))], dict[int, float](), Counter[tuple[int, int]]()
    while True:
        while len(running) < workers:
            point = new.pop(0) if new else next_promotion(losses, running.keys(), 2, len(RUNGS))
            if point is None:
                break
            rung = len(losses[point])
            seen[point, rung] += 1
            cost += share[rung + 1] - share[rung]
            running[point] = now + (share[rung + 1] - share[rung]) * chance.uniform(0.5, 2)
        if not running:
            assert set(seen.values()) == {1}, "a rung was trained twice"
            return losses, cost
        point = min(running, key=lambda each: running[each])
        now = running.pop(point)
        losses[point].append(curves[point][len(losses[point])])


@pytest.mark.parametrize("workers", [1, 2, 5, 16])
def test_halving_trains_the_best_of_each_rung_to_the_next_one(workers: int) -> None:
    costs = []
    for seed in range(40):
        chance = random.Random(seed)
        curves = [[chance.random() for _ in range(4)] for _ in range(16)]
        losses, cost = replay(curves, workers, seed)
        for rung, quota in enumerate((8, 4, 3)):
            arrived = [point for point in range(16) if len(losses[point]) > rung]
            best = sorted(arrived, key=lambda point: curves[point][rung])[:quota]
            assert all(len(losses[point]) > rung + 1 for point in best)
        costs.append(cost)
    assert min(costs) >= 5.5 and max(costs) <= (5.5 if workers == 1 else 8.5)
    assert describe_cost(16, 16, 2, RUNGS) == (
        "16 points: 16 x 1/8, 8 x 1/4, 4 x 1/2, 3 x 1: 5.5 full runs instead of 16 (34 %)"
    )


@pytest.mark.parametrize(
    ("points", "eta", "rungs", "counts"),
    [
        (16, 2, 3, [8, 4, 3]),
        (8, 2, 3, [4, 2, 1]),
        (12, 2, 3, [6, 3, 2]),
        (2, 2, 1, [1]),
        (2, 8, 1, [1]),
        (27, 3, 2, [9, 4]),
    ],
)
def test_last_rung_lets_one_more_point_go_on_but_not_all(points: int, eta: int, rungs: int, counts: list[int]) -> None:
    assert [points_that_go_on(points, eta, rung, rungs) for rung in range(rungs)] == counts


WORST = math.inf
DECISIONS: dict[str, tuple[list[list[float]], set[int], int | None]] = {
    "nothing is known": ([[], [], [], []], {0, 1}, None),
    "one of two, by ASHA": ([[2.0], [1.0], [], []], {2, 3}, 1),
    "one of one is none": ([[1.0], [], [], []], {1, 2, 3}, None),
    "certain while another runs": ([[1.0], [2.0], [3.0], []], {3}, 0),
    "highest rung first": ([[1.0, 1.0], [2.0, 2.0], [3.0], [4.0]], set(), 0),
    "the second of the quota": ([[1.0], [2.0], [3.0], [4.0]], {0}, 1),
    "ties by order": ([[1.0], [1.0], [1.0], [1.0]], set(), 0),
    "the last one alone": ([[1.0, 1.0, 1.0], [2.0, 2.0], [3.0], [4.0]], set(), 0),
    "a worse point ends": ([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0], [3.0], [4.0]], set(), None),
    "failed points never go on": ([[WORST], [WORST], [WORST], [5.0]], set(), 3),
    "all have failed": ([[WORST], [WORST], [WORST], [WORST]], set(), None),
    "a point that failed later": ([[1.0, WORST], [2.0, 3.0], [3.0], [4.0]], set(), 1),
    "the only point": ([[1.0]], set(), 0),
}


@pytest.mark.parametrize(("losses", "running", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_halving_decides_by_losses(losses: list[list[float]], running: set[int], expected: int | None) -> None:
    assert next_promotion(losses, running, 2, len(RUNGS)) == expected


@pytest.mark.parametrize(
    ("first", "eta", "shares"),
    [(0.125, 2, RUNGS), (0.1, 3, [0.1, 0.3, 0.9]), (0.5, 2, [0.5]), (1 / 3, 3, [1 / 3]), (0.0625, 4, [0.0625, 0.25])],
)
def test_rungs_are_shares_below_the_whole_run(first: float, eta: int, shares: list[float]) -> None:
    assert rung_shares(first, eta) == pytest.approx(shares)


def write_job(folder: Path, step: int, losses: dict[int, float], status: str = "interrupted", **run: Any) -> None:
    folder.mkdir(exist_ok=True)
    records = [{"kind": "eval", "step": at, "loss": loss if loss < WORST else None} for at, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    known = {"attempt": 1, "attempts": [{"total_steps": HALVED_STEPS}, {"total_steps": 99}], "evaluation": {"rows": 50}}
    (folder / "run.json").write_text(json.dumps({"status": status, "outcome": None, "step": step, **known, **run}))


REACHED: dict[str, tuple[int, dict[int, float], str, list[float], bool]] = {
    "new": (0, {}, "interrupted", [], False),
    "before the first rung": (1, {}, "interrupted", [], True),
    "at the first rung": (2, {2: 5.0}, "interrupted", [5.0], False),
    "beyond it": (3, {2: 5.0}, "interrupted", [5.0], True),
    "the first evaluation from a rung on": (9, {3: 5.0, 6: 4.0, 9: 3.0}, "interrupted", [5.0, 4.0, 3.0], False),
    "one evaluation for two rungs": (5, {5: 4.0}, "interrupted", [4.0, 4.0], False),
    "not finite": (2, {2: WORST}, "interrupted", [WORST], False),
    "overfitted": (4, {1: 4.5, 2: 5.0, 3: 4.0, 4: 6.0}, "interrupted", [4.5, 4.0], False),
    "not finite after a good evaluation": (4, {2: 5.0, 4: WORST}, "interrupted", [5.0, WORST], False),
    "completed": (16, {2: 5.0, 4: 4.0, 8: 3.0, 16: 2.0}, "completed", [5.0, 4.0, 3.0, 0.0], False),
    "completed without a pause": (16, {16: 2.0}, "completed", [WORST, WORST, WORST, 0.0], False),
}


@pytest.mark.parametrize(("step", "losses", "status", "expected", "between"), REACHED.values(), ids=REACHED)
def test_rungs_that_a_job_has_reached_are_in_its_records(
    step: int, losses: dict[int, float], status: str, expected: list[float], between: bool, tmp_path: Path
) -> None:
    write_job(tmp_path / "job", step, losses, status)
    reached = read_reached(tmp_path / "job", RUNGS)
    assert (reached.losses, reached.is_between) == (expected, between)


@pytest.mark.parametrize(
    ("weights", "ema_decay", "loss"), [("best", 0.9, 4.5), ("auto", 0, 4.5), ("auto", 0.9, 5.0), ("last", 0, 5.0)]
)
def test_rung_has_the_loss_that_the_leaderboard_will_rank(
    weights: str, ema_decay: float, loss: float, tmp_path: Path
) -> None:
    write_job(tmp_path / "job", 2, {1: 4.5, 2: 5.0}, "interrupted")
    (tmp_path / "job" / ".hydra").mkdir()
    config = {"export": {"weights": weights}, "train": {"ema_decay": ema_decay}}
    (tmp_path / "job" / ".hydra" / "config.yaml").write_text(json.dumps(config))
    assert read_reached(tmp_path / "job", RUNGS).losses == [loss]


def test_fields_of_wrong_types_count_as_missing(tmp_path: Path) -> None:
    """A damaged run.json is restored when its job is resumed; the search reads it before."""
    damaged = {"step": "x", "attempt": [1]}
    for branched in ("hello", {"step": "zz"}, {"step": None}):
        write_job(tmp_path / "job", 0, {2: 5.0}, branched_from=branched, **{"attempt": damaged["attempt"]})
        fields = json.loads((tmp_path / "job" / "run.json").read_text()) | damaged
        (tmp_path / "job" / "run.json").write_text(json.dumps(fields))
        reached = read_reached(tmp_path / "job", RUNGS)
        assert (reached.losses, reached.attempt, reached.total_steps) == ([5.0], 0, HALVED_STEPS)


def test_rungs_of_a_branch_are_shares_of_its_own_steps(tmp_path: Path) -> None:
    trunk = {2: 9.0, 4: 8.0, 8: 7.0}
    write_job(tmp_path / "job", 8, trunk, branched_from={"step": 8})
    assert read_reached(tmp_path / "job", RUNGS).losses == []
    write_job(tmp_path / "job", 10, trunk | {9: 6.0, 10: 5.0}, branched_from={"step": 8})
    assert read_reached(tmp_path / "job", RUNGS).losses == [6.0, 5.0]


@pytest.fixture
def state(tmp_path: Path) -> Any:
    with SweepState.create(tmp_path / "sweep", sweeper="halving", swept={"seed": ["0", "1"]}) as state:
        yield state


def drive(state: SweepState, curves: dict[str, list[float]], restarts: bool) -> list[tuple[str, int]]:
    """Run a sweep one job at a time, which is written instead of trained; with `restarts` each decision is that of a
    new search, as after a kill of everything.
    """
    search, order = HalvingSearch(state, HalvingOptions()), []
    while True:
        if restarts:
            state.refresh_from_runs()
            search = HalvingSearch(state, HalvingOptions())
        if (job := search.next_job()) is None:
            return order
        target = search.targets[job.name]
        assert search.arguments(job) == [f"train.stop_at={[*RUNGS, 0][target - 1]}"]
        order.append((job.name, target))
        steps = (2, 4, 8, 16)[:target]
        status = ("completed", "completed") if target == 4 else ("interrupted", "paused")
        losses = dict(zip(steps, curves[job.name], strict=False))
        write_job(state.folder / job.name, steps[-1], losses, status[0], outcome=status[1], metrics={"loss": 1.0})
        job.attempt += 1
        state.refresh_job(job)
        assert job.status == ("completed" if target == 4 else "paused") and not job.needs_run
        search.job_ended(job)


@pytest.mark.parametrize("seeds", [1, 2])
def test_halving_of_killed_searches_is_that_of_one_search(state: SweepState, seeds: int, tmp_path: Path) -> None:
    chance, curves = random.Random(1), {}
    for lr in ("1", "2", "3", "4", "5"):
        for seed in range(seeds):
            job = state.add_job({"optimizer.lr": lr, "seed": str(seed)} if seeds > 1 else {"optimizer.lr": lr})
            curves[job.name] = [chance.random() for _ in range(4)]
    order = drive(state, curves, restarts=False)
    for job in state.jobs:
        job.status, job.attempt = "new", 0
        for file in (tmp_path / "sweep" / job.name).iterdir():
            file.unlink()
    assert drive(state, curves, restarts=True) == order and len(set(order)) == len(order)
    assert Counter(target for _, target in order) == {1: 5 * seeds, 2: 2 * seeds, 3: seeds, 4: seeds}


def test_halving_judges_a_point_by_the_mean_over_its_seeds(state: SweepState) -> None:
    """The lowest loss is one of lr=1, the lowest mean that of lr=2."""
    for lr, losses in (("1", (0.1, 9.0)), ("2", (2.0, 2.0))):
        for seed, loss in enumerate(losses):
            job = state.add_job({"optimizer.lr": lr, "seed": str(seed)})
            job.attempt = 1
            write_job(state.folder / job.name, 2, {2: loss}, outcome="paused")
    state.refresh_from_runs()
    search = HalvingSearch(state, HalvingOptions())
    jobs = [search.next_job(), search.next_job(), search.next_job()]
    assert [job and job.overrides for job in jobs] == [
        {"optimizer.lr": "2", "seed": "0"}, {"optimizer.lr": "2", "seed": "1"}, None,
    ]  # fmt: skip


def test_halving_continues_a_killed_job_before_a_new_one(state: SweepState) -> None:
    for lr in ("1", "2", "3"):
        state.add_job({"optimizer.lr": lr})
    write_job(state.folder / "optimizer.lr=3", 3, {2: 1.0}, "running")
    state.jobs[2].attempt = 1
    search = HalvingSearch(state, HalvingOptions())
    job = search.next_job()
    assert job is state.jobs[2] and search.arguments(job) == ["train.stop_at=0.25"]


def test_halving_leaves_the_other_seed_of_a_job_that_was_trained_by_hand(state: SweepState) -> None:
    curve = {2: 5.0, 4: 4.0, 8: 3.0, 16: 2.0}
    for lr, loss in (("1", 5.0), ("2", 1.0)):
        for seed in ("0", "1"):
            job = state.add_job({"optimizer.lr": lr, "seed": seed})
            job.attempt = 1
            write_job(state.folder / job.name, 2, {2: loss}, outcome="paused")
    done = {"outcome": "completed", "metrics": {"loss": 1.0}}
    write_job(state.folder / state.jobs[0].name, 16, curve, "completed", attempt=2, **done)
    state.refresh_from_runs()
    search, handed_out = HalvingSearch(state, HalvingOptions()), []
    while job := search.next_job():
        handed_out.append(job.overrides["optimizer.lr"])
        search.targets.pop(job.name)
        search.reached[job.name].losses.append(1.0)
    assert handed_out == ["2"] * 6  # three more rungs of each seed


def statuses(sweep: Path) -> list[tuple[str, str]]:
    return [(job["name"].removeprefix("optimizer.lr="), job["status"]) for job in read_sweep(sweep)["jobs"]]


def attempts(sweep: Path) -> list[int]:
    return [job["attempt"] for job in read_sweep(sweep)["jobs"]]


@pytest.mark.slow
def test_halving_sweep_pauses_the_worse_jobs_and_is_completed(
    sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    fake_jobs.set(default=HALVED)
    assert sweep(*HALVING, LRS, "hydra.launcher.workers=2") == 0
    folder = tmp_path / "sweep"
    assert attempts(folder) == [4, 3, 2, 2, 1, 1, 1, 1] and read_sweep(folder)["status"] == "completed"
    assert [status for _, status in statuses(folder)] == ["completed"] + ["paused"] * 7
    console, certainty = capfd.readouterr(), "the only point that was trained to its end; 7 of 8 points are paused"
    cost = "8 points: 8 x 1/8, 4 x 1/4, 2 x 1/2, 1 x 1: 2.5 full runs instead of 8 (31 %)"
    assert cost in console.err and certainty in " ".join(console.out.split())
    results = read_sweep_results(folder)
    assert [row.progress for row in results.rows] == [
        "completed", "paused at 1/2", "paused at 1/4", "paused at 1/4", *["paused at 1/8"] * 4,
    ]  # fmt: skip
    assert [row.overrides["optimizer.lr"] for row in results.rows] == [f"0.00{number}" for number in range(1, 9)]
    assert (
        "paused" in leaderboard_csv(results)
        and not results.is_unfinished
        and "stop_at" not in results.job_command(results.jobs[1])
    )
    assert resume("train.max_steps=16") == 0 and attempts(folder) == [4, 3, 2, 2, 1, 1, 1, 1]  # not changed
    assert resume("optimizer.lr=1e-4") == 0
    assert statuses(folder)[-1] == ("0.0001", "completed") and attempts(folder) == [4, 3, 2, 2, 1, 1, 1, 1, 4]
    for moved in (
        "train.max_steps=32",
        "train.eval_every=8",
        "train.patience=1",
        "train.stop_at=0.3",
        "hydra.sweeper.eta=4",
    ):
        with pytest.raises(UserError, match="length and evaluations of jobs that are compared"):
            resume(moved)


@pytest.mark.slow
def test_halving_lets_two_points_finish_where_seeds_are_to_be_added(
    sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """Of four points one trains to its end, and seeds compare two."""
    fake_jobs.set(default=HALVED)
    assert sweep(*HALVING, "optimizer.lr=1e-3,2e-3,3e-3,4e-3", "sweep.seeds=2") == 0
    jobs = [job["overrides"] for job in read_sweep(tmp_path / "sweep")["jobs"] if job["status"] == "completed"]
    assert sorted((job["optimizer.lr"], "seed" in job) for job in jobs) == [
        ("0.001", False), ("0.001", True), ("0.002", False), ("0.002", True),
    ]  # fmt: skip


@pytest.mark.slow
def test_halving_sweep_goes_on_without_jobs_that_fail(
    sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """The best job diverges, the second one is killed at its first rung; `resume=` tries that one again."""
    fake_jobs.set_all({"optimizer.lr=0.001": DIVERGED, "optimizer.lr=0.002": KILLED})
    fake_jobs.set(default=HALVED)
    four = "optimizer.lr=1e-3,2e-3,3e-3,4e-3"
    assert sweep(*HALVING, four) == 1
    assert [status for _, status in statuses(tmp_path / "sweep")] == ["failed", "failed", "completed", "paused"]
    fake_jobs.set_all({"optimizer.lr=0.002": HALVED})
    assert resume() == 1
    assert [status for _, status in statuses(tmp_path / "sweep")] == ["failed", "completed", "completed", "paused"]
    assert attempts(tmp_path / "sweep")[0] == 1


@pytest.mark.parametrize("retries", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_halving_records_the_pause_of_a_job_killed_at_its_rung(
    retries: int, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """Its evaluation is recorded, its pause not: no rung is trained twice, and nothing has failed."""
    fake_jobs.set(default=HALVED.replace("known['step']", f"if fields['attempt'] == 1: {KILLED}\nknown['step']"))
    assert sweep(*HALVING, "optimizer.lr=1e-3,2e-3,3e-3,4e-3", f"hydra.launcher.retries={retries}") == 0
    assert [status for _, status in statuses(tmp_path / "sweep")] == ["completed", *["paused"] * 3]
    assert attempts(tmp_path / "sweep") == [4, 2, 1, 1]


@pytest.mark.slow
def test_halving_sweep_that_is_stopped_continues(sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path) -> None:
    fake_jobs.set(default=HALVED)
    stop = f"if len(json.load(open('../sweep.json'))['jobs']) and fields['attempt'] == 2: os.kill(os.getppid(), 15)\n{SAVES}"
    fake_jobs.set_all(
        {"optimizer.lr=0.001": f"if fields['attempt'] != 2:\n    exec({HALVED!r})\nelse:\n    exec({stop!r})"}
    )
    assert sweep(*HALVING, "optimizer.lr=1e-3,2e-3,3e-3,4e-3") == 75
    assert read_sweep(tmp_path / "sweep")["status"] == "interrupted"
    assert read_sweep_results(tmp_path / "sweep").is_unfinished
    fake_jobs.set_all({"optimizer.lr=0.001": HALVED})
    assert resume() == 0 and [status for _, status in statuses(tmp_path / "sweep")] == ["completed", *["paused"] * 3]


UNUSABLE = {
    "judged on 1 row": HALVED.replace("'rows': 50", "'rows': 1"),
    "judged with different losses: beta differs": HALVED.replace("'rows': 50", "'rows': 50, 'loss': {'beta': lr}"),
    "has no evaluation between 1/8 and 1/4": HALVED.replace("end = int", "end = 8 or int").replace("% 2", "% 8"),
    "has no evaluation between 1/8 and 1/4 of its steps": HALVED.replace("end = int", "end = 16 or int").replace(
        "% 2", "% 16"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "script"), UNUSABLE.items(), ids=UNUSABLE)
def test_halving_ends_where_losses_cannot_tell_jobs_apart(
    problem: str, script: str, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=script)
    with pytest.raises(TrainingError, match=problem):
        sweep(*HALVING, "optimizer.lr=1e-3,2e-3,3e-3,4e-3")
    assert read_sweep(tmp_path / "sweep")["status"] == "failed"
    assert [status for _, status in statuses(tmp_path / "sweep")][2:] == ["new", "new"]


REFUSED = {
    "train.eval_every=3": "needs an evaluation at each rung, the first one after 2 of 16 steps",
    "train.eval_every=0": "compares jobs by their evaluations",
    "train.patience=2": "ends jobs early itself",
    "train.stop_at=0.5": "ends jobs early itself",
    "hydra.sweeper.eta=1": "hydra.sweeper.eta must be at least 2",
    "hydra.sweeper.first_rung=1": r"hydra.sweeper.first_rung must be in \(0, 1\)",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items(), ids=REFUSED)
def test_halving_refuses_settings_without_rungs(override: str, message: str, sweep: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        sweep(*HALVING, "optimizer.lr=1e-3,2e-3", override)
    assert not (tmp_path / "sweep").exists()


def test_halving_warns_of_jobs_that_differ_in_tokens_at_a_rung(capfd: pytest.CaptureFixture[str]) -> None:
    """Steps are whole: 1/8 of 10 steps of 16 rows are 32 rows, of 80 steps of 2 rows 20; rows are packed."""
    sizes = [f"train.batch_size={size}" for size in (2, 16)]
    configs = [compose_config(["train.max_steps=80", "train.eval_every=10", size]) for size in sizes]
    derived = [{}, {"train.max_steps": "10", "train.eval_every": "1"}]
    HalvingOptions().check_rungs(configs, derived)
    assert "at 1/8 of their steps the jobs have trained on 5120 to 8192 tokens" in capfd.readouterr().err
    HalvingOptions().check_rungs(configs[:1], derived[:1])
    assert not capfd.readouterr().err


def test_halving_warns_of_a_warmup_beyond_the_first_rung(capfd: pytest.CaptureFixture[str]) -> None:
    length = ["train.max_steps=80", "train.eval_every=10"]
    configs = [compose_config([*length, f"schedule.warmup_steps={steps}"]) for steps in (0, 20, 30)]
    HalvingOptions().check_rungs(configs, [{}] * 3)
    (line,) = capfd.readouterr().err.splitlines()
    assert "schedule.warmup_steps=20 is longer than the first rung (10 steps)" in line
    assert line.endswith("hydra.sweeper.first_rung=0.25")
