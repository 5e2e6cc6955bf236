"""Sweeps of real trainings: killed when their jobs have logged some records, continued, stopped, extended; every job
ends in the bits of an undisturbed sweep.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from command_fixtures import TINY_MODEL
from fake_jobs import read_run, read_sweep, wait_until
from fault_counts import faults, only_full
from warm_programs import ForkedProcess, WarmPrograms

from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.best_job import find_best_job

SETTINGS = [
    *TINY_MODEL, "model.dropout=0.1", "data.max_length=32", "data.val_path=null", "data.val_fraction=0.2", "init_from=scratch", "train.batch_size=2",
    "train.max_steps=60", "train.log_every=4", "train.save_every=8", "train.eval_every=20", "train.sample_every=0", "device=cpu", "tracker.console=quiet", "tracker.page=false",
]  # fmt: skip
SWEPT = ["train.accumulation_steps=1,4"]
SMALL_STEPS, LARGE_STEPS = "train.accumulation_steps=1", "train.accumulation_steps=4"
WAIT = 300  # seconds; ten on a quiet machine

Launch = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": f"{i} boats: " + "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n"
            for i in range(40)
        )
    )
    return file


@pytest.fixture(scope="module")
def launch(checkout: Path, rows: Path, warm_checkout: WarmPrograms) -> Launch:
    """`launch(*argv)` starts train.py and its jobs as forks of a process that has imported torch."""
    train, output = checkout / "runner" / "train.py", rows.parent / "stderr"
    return lambda *argv: warm_checkout.start(train, *argv, cwd=rows.parent, out=output)


def arguments(folder: Path, rows: Path, *swept: str) -> list[str]:
    return [
        "-m",
        *SETTINGS,
        f"data.path={rows}",
        *(swept or SWEPT),
        f"hydra.sweep.dir={folder}",
        "hydra.launcher.workers=2",
    ]


@pytest.fixture(scope="module")
def undisturbed(launch: Launch, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "undisturbed"
    assert launch(*arguments(folder, rows)).wait(WAIT) == 0, (rows.parent / "stderr").read_text()
    return folder


def statuses(folder: Path) -> dict[str, str]:
    return {job["name"]: job["status"] for job in read_sweep(folder)["jobs"]}


def steps(run_dir: Path) -> list[tuple[str, int]]:
    file = run_dir / "metrics.jsonl"
    return (
        [(record["kind"], record["step"]) for record in map(json.loads, file.read_text().splitlines())]
        if file.exists()
        else []
    )


def assert_same_bits(undisturbed: Path, folder: Path) -> None:
    """Every job of `folder` ended in the bits of the undisturbed one, and none of its steps was taken twice."""
    assert statuses(folder) == statuses(undisturbed)
    for name in statuses(undisturbed):
        assert diff_run_dirs(undisturbed / name, folder / name) == []
        assert steps(folder / name) == steps(undisturbed / name)


@pytest.mark.slow
def test_sweep_of_real_runs_records_their_validation_loss_and_equal_tokens(undisturbed: Path) -> None:
    sweep = read_sweep(undisturbed)
    assert sweep["status"] == "completed" and set(statuses(undisturbed).values()) == {"completed"}
    runs = {name: read_run(undisturbed / name) for name in (SMALL_STEPS, LARGE_STEPS)}
    assert {job["name"]: job["loss"] for job in sweep["jobs"]} == {
        name: run["export"]["loss"] for name, run in runs.items()
    }
    assert find_best_job(undisturbed).name == min(runs, key=lambda name: runs[name]["metrics"]["best_val_loss"])
    assert (runs[SMALL_STEPS]["step"], runs[LARGE_STEPS]["step"]) == (60, 15)
    assert runs[LARGE_STEPS]["tokens"] == pytest.approx(runs[SMALL_STEPS]["tokens"], rel=0.05)


@only_full
@pytest.mark.slow
def test_sweep_killed_and_resumed_ends_in_the_same_bits(
    undisturbed: Path, launch: Launch, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    driver = launch(*arguments(folder, rows))
    wait_until(lambda: steps(folder / SMALL_STEPS))
    driver.kill()
    driver.wait()
    assert "running" in statuses(folder).values()
    assert launch(f"resume={folder}").wait(WAIT) == 0, (rows.parent / "stderr").read_text()
    assert_same_bits(undisturbed, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT", marks=only_full)]
)
def test_sweep_stopped_by_a_signal_saves_every_job_and_resumes(
    undisturbed: Path, launch: Launch, rows: Path, tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "stopped"
    driver = launch(*arguments(folder, rows))
    wait_until(lambda: steps(folder / SMALL_STEPS))
    driver.send_signal(number)
    assert driver.wait(WAIT) == 75
    assert f"resume={folder}" in (rows.parent / "stderr").read_text()
    assert read_sweep(folder)["status"] == "interrupted" and set(statuses(folder).values()) <= {
        "interrupted",
        "new",
        "completed",
    }
    assert launch(f"resume={folder}").wait(WAIT) == 0
    assert_same_bits(undisturbed, folder)


@pytest.mark.slow
def test_sweep_resumed_with_more_steps_continues_every_job_by_its_share(
    launch: Launch, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    shorter = [each.replace("max_steps=60", "max_steps=24") for each in arguments(folder, rows)]
    assert launch(*shorter, "schedule=constant").wait(WAIT) == 0
    assert launch(f"resume={folder}", "train.max_steps=32").wait(WAIT) == 0
    assert {name: read_run(folder / name)["step"] for name in statuses(folder)} == {SMALL_STEPS: 32, LARGE_STEPS: 8}


@pytest.mark.slow
def test_sweep_job_that_diverges_has_an_infinite_loss_and_is_not_retried(
    launch: Launch, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    assert (
        launch(
            *arguments(folder, rows, "optimizer.lr=1e-3,1e30"), "optimizer.grad_clip=0", "hydra.launcher.retries=2"
        ).wait(WAIT)
        == 1
    )
    good, bad = read_sweep(folder)["jobs"]
    assert good["status"] == "completed"
    assert (
        (bad["status"], bad["outcome"], bad["loss"], bad["attempt"]) == ("failed", "diverged", "inf", 1)
        and bad["error"]
        and bad["last_lines"]
    )
    assert launch(f"resume={folder}").wait(WAIT) == 1
    assert read_run(folder / bad["name"])["attempt"] == 1


KILLS = faults(3, full=10)  # one of each kind


@pytest.mark.slow(long=True)
def test_sweep_survives_kills_of_driver_job_or_both(
    undisturbed: Path, launch: Launch, rows: Path, tmp_path: Path
) -> None:
    chance, kills, sweeps = random.Random(10), 0, 0
    while kills < KILLS:
        sweeps += 1
        folder = tmp_path / f"killed{sweeps}"
        start, output = arguments(folder, rows), rows.parent / "stderr"
        kills = kill_until_completed(launch, start, folder, undisturbed, chance, kills, output)
        assert_same_bits(undisturbed, folder)


def kill_until_completed(
    launch: Launch, start: list[str], folder: Path, undisturbed: Path, chance: random.Random, kills: int, output: Path
) -> int:
    """Run a sweep to its end; kill each launch when its jobs have logged some further records, if it has not ended
    before. Return the number of kills, from `kills` up to KILLS.
    """
    attempts: dict[str, int] = {}  # of the jobs that were completed at some time
    code, names = -9, [*statuses(undisturbed)]
    while code != 0:
        driver = launch(*([f"resume={folder}"] if (folder / "sweep.json").exists() else start))
        limit = sum(len(steps(folder / name)) for name in names) + chance.randint(1, 2)
        while driver.poll() is None and sum(len(steps(folder / name)) for name in names) < limit:
            time.sleep(0.01)
        if kills < KILLS and driver.poll() is None:
            servers = children_of(driver.pid)  # each forks jobs
            jobs = [job for server in servers for job in children_of(server)]
            # a job last: the driver goes on without it, to the end of the sweep
            victims = ([driver.pid], [driver.pid, *servers, *jobs], jobs[:1])[kills % 3]
            for pid in victims:
                with suppress(ProcessLookupError):  # a job that has ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            kills += bool(victims)
        code = driver.wait(WAIT)  # a driver that lost a job goes on with the others, and fails
        assert code in (0, 1, -9), output.read_text()
        attempts |= {
            name: read_run(folder / name)["attempt"]
            for name, status in statuses(folder).items()
            if status == "completed" and name not in attempts
        }
    assert {name: read_run(folder / name)["attempt"] for name in attempts} == attempts, "a completed job was run again"
    return kills


def children_of(pid: int) -> list[int]:
    with suppress(FileNotFoundError):  # it has ended meanwhile
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@pytest.mark.slow
def test_optuna_study_of_real_runs_continues_after_a_kill(launch: Launch, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs Optuna: pip install 'lm-runner[optuna]'")
    optuna = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.seed=7",
        "hydra.sweeper.n_trials=3",
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
        "train.batch_size=2,4",
    )
    folder = tmp_path / "sweep"
    driver = launch("-m", *SETTINGS, *optuna, f"hydra.sweep.dir={folder}")
    wait_until(
        lambda: (
            (folder / "sweep.json").exists()
            and len(jobs := read_sweep(folder)["jobs"]) == 2
            and steps(folder / jobs[1]["name"])
        )
    )
    driver.kill()
    driver.wait()
    names = [job["name"] for job in read_sweep(folder)["jobs"]]
    assert launch(f"resume={folder}").wait(WAIT) == 0, (rows.parent / "stderr").read_text()
    jobs = read_sweep(folder)["jobs"]
    assert [job["name"] for job in jobs[:2]] == names and [
        read_run(folder / job["name"])["attempt"] for job in jobs
    ] == [1, 2, 1]


FOUR_RATES = "optimizer.lr=1e-4,1e-3,1e-2,1e-1"
OFTEN = [each for each in SETTINGS if not each.startswith(("data.val_fraction", "train.eval_every", "train.max_steps"))]
OFTEN += ["data.val_fraction=0.3", "train.eval_every=4", "train.max_steps=32"]


def four_rates(folder: Path, rows: Path, *more: str, rates: str = FOUR_RATES, workers: int = 2) -> list[str]:
    own = [f"data.path={rows}", rates, f"hydra.sweep.dir={folder}", f"hydra.launcher.workers={workers}"]
    return ["-m", *OFTEN, *own, *more]


@pytest.fixture(scope="module")
def grid(launch: Launch, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grid") / "grid"
    assert launch(*four_rates(folder, rows)).wait(WAIT) == 0, (rows.parent / "stderr").read_text()
    return folder


def assert_halved(grid: Path, folder: Path) -> None:
    """The winner is that of the grid, bitwise; every other job has a part of the records of its job in the grid."""
    best = find_best_job(grid).name
    assert find_best_job(folder).name == best and diff_run_dirs(grid / best, folder / best) == []
    # promotion is asynchronous: of three at a rung a late one goes on beside the better one of the two before it
    ended = Counter(statuses(folder).values())
    assert ended["completed"] in (1, 2) and ended["paused"] == 4 - ended["completed"]
    sweep = read_sweep(folder)
    assert sweep["status"] == "completed" and all(job["ended"] for job in sweep["jobs"])
    for name in statuses(grid):
        own, whole = steps(folder / name), steps(grid / name)
        assert own == whole[: len(own)] and ("eval", 4) in own
        assert read_run(folder / name)["outcome"] == statuses(folder)[name]


@pytest.mark.slow
def test_halving_of_real_runs_has_the_winner_of_the_grid(
    grid: Path, launch: Launch, rows: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "halving"
    assert launch(*four_rates(folder, rows, "hydra/sweeper=halving")).wait(WAIT) == 0, (
        rows.parent / "stderr"
    ).read_text()
    assert_halved(grid, folder)
    assert sum(step for job in statuses(folder) for kind, step in steps(folder / job)[-1:]) < 0.75 * 4 * 32
    loser = next(name for name, status in statuses(folder).items() if status == "paused")
    assert launch(f"resume={folder / loser}").wait(WAIT) == 0
    # the settings differ in train.stop_at
    assert diff_run_dirs(grid / loser, folder / loser) == ["state.json: compatibility"]
    assert launch(f"resume={folder}").wait(WAIT) == 0 and statuses(folder)[loser] == "completed"
    assert find_best_job(folder).name == find_best_job(grid).name


@pytest.mark.slow(long=True)
def test_halving_survives_kills_of_driver_job_or_both(grid: Path, launch: Launch, rows: Path, tmp_path: Path) -> None:
    chance, kills, sweeps = random.Random(3), 0, 0
    while kills < KILLS:
        sweeps += 1
        folder = tmp_path / f"killed{sweeps}"
        start, output = four_rates(folder, rows, "hydra/sweeper=halving"), rows.parent / "stderr"
        kills = kill_until_completed(launch, start, folder, grid, chance, kills, output)
        assert_halved(grid, folder)


@pytest.mark.slow
def test_optuna_prunes_real_runs_at_rungs(grid: Path, launch: Launch, rows: Path, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="needs Optuna: pip install 'lm-runner[optuna]'")
    folder, storages = tmp_path / "pruned", optuna.storages
    options = (
        "hydra/sweeper=optuna",
        "hydra.sweeper.sampler=grid",
        "hydra.sweeper.seed=1",
        "hydra.sweeper.pruner=halving",
    )
    best_first = four_rates(folder, rows, *options, rates="optimizer.lr=1e-1,1e-2,1e-3,1e-4", workers=1)
    assert launch(*best_first).wait(WAIT) == 0, (rows.parent / "stderr").read_text()
    best = find_best_job(grid).name
    assert find_best_job(folder).name == best and diff_run_dirs(grid / best, folder / best) == []
    backend = storages.journal.JournalFileBackend(str(folder / "optuna.jsonl"))
    study = optuna.load_study(study_name="sweep", storage=storages.JournalStorage(backend))
    states = {f"optimizer.lr={trial.params['optimizer.lr']}": trial.state.name for trial in study.trials}
    assert {
        name: {"completed": "COMPLETE", "paused": "PRUNED"}[status] for name, status in statuses(folder).items()
    } == states
    assert Counter(states.values()) == {"COMPLETE": 1, "PRUNED": 3}
    assert all(len(trial.intermediate_values) == (3 if trial.state.name == "COMPLETE" else 1) for trial in study.trials)
    assert launch(f"resume={folder}").wait(WAIT) == 0 and len(statuses(folder)) == 4
