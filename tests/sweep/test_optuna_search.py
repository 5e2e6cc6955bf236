"""Points that Optuna draws. Where Optuna is not installed, its options are tested only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_jobs import DIVERGED, FLAKY, HALVED, KILLED, SAVES, FakeJobs, read_sweep

from common.errors import TrainingError, UserError
from runner.sweep.optuna_search import OptunaOptions, _drop_partial_line, parse_distribution

RECORDS = [
    {"kind": "train", "tokens_per_second": 5.0},
    {"kind": "train", "tokens_per_second": 7.0},
    {"kind": "eval", "loss": 3.0},
]
LOGS = f"open('metrics.jsonl', 'w').write({''.join(json.dumps(record) + chr(10) for record in RECORDS)!r})\n"
LOSS = "values = dict(pair.split('=') for pair in os.path.basename(run_dir).split(','))\n"
LOSS += "write('completed', 'completed', metrics={'loss': float(values['optimizer.lr']) * 1000})"
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1e-2))", "train.accumulation_steps=1,2")
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.seed=7")


@pytest.fixture
def optuna() -> Any:
    return pytest.importorskip("optuna", reason="needs Optuna: pip install 'lm-runner[optuna]'")


def trials(sweep: Path) -> list[Any]:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return optuna.load_study(
        study_name="sweep", storage=JournalStorage(JournalFileBackend(str(sweep / "optuna.jsonl")))
    ).get_trials()


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("train.accumulation_steps", ["1", "2", "4"], {"choices": ("1", "2", "4")}),
        ("optimizer.lr", ["tag(log,interval(1e-5,1e-2))"], {"low": 1e-5, "high": 1e-2, "log": True, "step": None}),
        ("optimizer.weight_decay", ["interval(0,1)"], {"low": 0.0, "high": 1.0, "log": False, "step": None}),
        ("train.batch_size", ["interval(1,16)"], {"low": 1, "high": 16, "log": False, "step": 1}),
        ("train.batch_size", ["interval(1.5,16.5)"], {"low": 2, "high": 16, "log": False, "step": 1}),
        ("train.batch_size", ["tag(log,range(1,9))"], {"low": 1, "high": 8, "log": True, "step": 1}),
        ("seed", ["range(1,9,2)"], {"low": 1, "high": 7, "log": False, "step": 2}),
        ("optimizer.lr", ["range(0.1,0.5,0.1)"], {"low": 0.1, "high": 0.4, "log": False, "step": 0.1}),
        ("optimizer", ["adamw"], {"choices": ("adamw",)}),
    ],
)
def test_search_space_of_an_override(optuna: Any, key: str, values: list[str], expected: dict[str, Any]) -> None:
    distribution = parse_distribution(key, values)
    assert {name: getattr(distribution, name) for name in expected} == expected
    kinds = {"choices": "CategoricalDistribution", "low": type(expected.get("low")).__name__.title() + "Distribution"}
    assert type(distribution).__name__ == kinds[next(iter(expected))]


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "3", "{}", '{"op_code": "0"}', '{"op_code": 0', "[" + "[]," * 4_000_000 + "[]]"]
)
def test_study_with_a_damaged_line_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "optuna.jsonl").write_text('{"op_code": 4, "values": [NaN]}\n' + line + '\n{"op_')
    with pytest.raises(UserError, match="the study is damaged") as refused:
        _drop_partial_line(tmp_path / "optuna.jsonl")
    assert refused.value.setting.endswith("optuna.jsonl:2")


def test_study_is_cut_back_to_its_last_complete_line(tmp_path: Path) -> None:
    (tmp_path / "optuna.jsonl").write_text('{"op_code": 4, "values": [NaN]}\n{"op_')
    _drop_partial_line(tmp_path / "optuna.jsonl")
    assert (tmp_path / "optuna.jsonl").read_text() == '{"op_code": 4, "values": [NaN]}\n'


@pytest.mark.parametrize(
    "text", ["interval(2,1)", "tag(log,interval(0,1))", "tag(log,range(1,9,2))", "tag(log,range(1.0,9.0))"]
)
def test_search_space_refuses_an_empty_interval(optuna: Any, text: str) -> None:
    with pytest.raises(UserError, match="the interval of optimizer.lr must have"):
        parse_distribution("optimizer.lr", [text])
    with pytest.raises(UserError, match="the interval of seed must have"):
        parse_distribution("seed", ["interval(1.2,1.8)"])


INVALID: dict[str, dict[str, Any]] = {
    "direction missing": {"objectives": ["loss", "tokens_per_second"]},
    "objective missing": {"direction": ["minimize", "maximize"]},
    "no objective": {"objectives": [], "direction": []},
    "unknown direction": {"direction": "minimise"},
    "no trials": {"n_trials": 0},
    "sampler with pickles": {"sampler": "cmaes"},
    "unknown pruner": {"pruner": "hyperband"},
    "pruner of two objectives": {"pruner": "median", "objectives": ["loss", "tokens"], "direction": ["minimize"] * 2},
    "pruner of another objective": {"pruner": "halving", "objectives": ["tokens"], "direction": "maximize"},
}


@pytest.mark.parametrize("options", INVALID.values(), ids=INVALID)
def test_options_of_optuna_are_refused(options: dict[str, Any]) -> None:
    OptunaOptions(objectives=["loss", "tokens"], direction=["minimize", "maximize"])
    with pytest.raises(UserError):
        OptunaOptions(**options)


@pytest.mark.slow
def test_optuna_refuses_an_end_of_an_interval_that_no_job_could_take(optuna: Any, sweep: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="min_lr_ratio"):
        sweep(*OPTUNA, "schedule.min_lr_ratio=interval(0,2)")
    with pytest.raises(UserError, match="sampler=grid needs lists"):
        sweep(*OPTUNA, *SPACE, "hydra.sweeper.sampler=grid")
    with pytest.raises(UserError, match="sweep.zip needs hydra/sweeper=grid"):
        sweep(*OPTUNA, *SPACE, "sweep.zip=[optimizer.lr]")
    with pytest.raises(UserError, match="would search for the best seed"):
        sweep(*OPTUNA, *SPACE, "seed=1,2")
    with pytest.raises(UserError, match="sampler=grid needs lists"):
        sweep(*OPTUNA, "train.batch_size=interval(1,16)", "hydra.sweeper.sampler=grid")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_optuna_draws_points_and_reports_losses_to_its_study(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=LOSS)
    assert sweep(*OPTUNA, *SPACE, "hydra.sweeper.n_trials=2", "hydra.launcher.workers=2") == 0
    jobs = read_sweep(tmp_path / "sweep")["jobs"]
    assert [job["status"] for job in jobs] == ["completed"] * 2
    assert [trial.value for trial in trials(tmp_path / "sweep")] == [job["loss"] for job in jobs]
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert best["best_evaluated_value"] == min(job["loss"] for job in jobs) and "problem" not in best
    assert (best["evaluation_rows"], best["seeds_per_point"]) == (0, 1)  # the fake jobs evaluate nothing
    assert resume() == 0 and len(read_sweep(tmp_path / "sweep")["jobs"]) == 2
    assert resume("hydra.sweeper.n_trials=4") == 0
    again = read_sweep(tmp_path / "sweep")["jobs"]
    assert len({job["name"] for job in again}) == 4 and again[:2] == jobs  # the seed draws other points than before
    with pytest.raises(UserError, match="search space of a study cannot change"):
        resume("train.accumulation_steps=4")
    for other in ("hydra.sweeper.objectives=[tokens_per_second]", "hydra.sweeper.direction=maximize"):
        with pytest.raises(UserError, match="the search of a sweep cannot change"):
            resume(other)
    assert resume() == 0 and read_sweep(tmp_path / "sweep")["jobs"] == again


@pytest.mark.slow
def test_optuna_draws_the_next_point_as_soon_as_a_worker_is_free(
    optuna: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """Job 1 ends only after three others have: a sampler that waits for a whole batch would wait forever."""
    fake_jobs.set(
        default=f"""
others = lambda: [job for job in json.load(open("../sweep.json"))["jobs"] if job["status"] == "completed"]
first = json.load(open("../sweep.json"))["jobs"][0]["name"] == os.path.basename(run_dir)
while first and len(others()) < 3: time.sleep(0.01)
{LOSS}"""
    )
    assert sweep(*OPTUNA, *SPACE, "hydra.sweeper.n_trials=4", "hydra.launcher.workers=2") == 0
    assert [trial.state.name for trial in trials(tmp_path / "sweep")] == ["COMPLETE"] * 4


@pytest.mark.slow
def test_optuna_continues_open_and_failed_trials_in_their_directories(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """As after a kill: the first trial failed, the second one is open, of the third one parameter is drawn, the last
    line is incomplete.
    """
    fake_jobs.set(default=FLAKY)
    assert sweep(*OPTUNA, *SPACE, "hydra.sweeper.n_trials=2") == 1
    names = [job["name"] for job in read_sweep(tmp_path / "sweep")["jobs"]]
    log = tmp_path / "sweep" / "optuna.jsonl"
    lines = log.read_text().splitlines()
    start_of_second = next(index for index, line in enumerate(lines) if '"trial_id":1' in line) - 1
    half_drawn = [lines[start_of_second], lines[start_of_second + 1].replace('"trial_id":1', '"trial_id":2')]
    log.write_text("\n".join([*lines[:-1], *half_drawn]) + '\n{"op_co')  # without the end of the second trial
    assert [trial.state.name for trial in trials_after_repair(log)] == ["FAIL", "RUNNING", "RUNNING"]
    assert resume() == 0
    jobs = read_sweep(tmp_path / "sweep")["jobs"]
    assert [job["name"] for job in jobs[:2]] == names and [job["attempt"] for job in jobs[:2]] == [2, 2]
    assert sum(trial.state.name == "COMPLETE" for trial in trials(tmp_path / "sweep")) == 2


def trials_after_repair(log: Path) -> list[Any]:
    copy = log.parent / "copy"
    copy.mkdir()
    (copy / "optuna.jsonl").write_bytes(log.read_bytes().rpartition(b"\n")[0] + b"\n")
    return trials(copy)


@pytest.mark.slow
def test_optuna_results_say_that_jobs_judged_on_few_rows_are_not_ranked(
    optuna: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=LOSS.replace("'completed', m", "'completed', evaluation={'rows': 1}, m"))
    assert sweep(*OPTUNA, *SPACE, "hydra.sweeper.n_trials=2") == 0
    problem = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())["problem"]
    assert problem.startswith("the jobs were judged on 1 row: not told apart")


@pytest.mark.slow
def test_optuna_takes_a_diverged_point_as_infinitely_bad(
    optuna: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set_all({"optimizer.lr=1e+30": DIVERGED})
    assert (
        sweep(
            "hydra/sweeper=optuna", "hydra.sweeper.sampler=grid", "optimizer.lr=1e-3,1e30", "hydra.launcher.workers=2"
        )
        == 1
    )
    assert sorted(trial.value for trial in trials(tmp_path / "sweep")) == [1.5, float("inf")]


@pytest.mark.slow
def test_optuna_gives_a_diverged_point_no_value_of_another_objective(
    optuna: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """It is the fastest, and not the best."""
    fake_jobs.set(default=LOGS.replace("7.0", "5.0") + LOSS)
    fake_jobs.set_all({"optimizer.lr=1e+30": LOGS + DIVERGED})
    objective = ("hydra.sweeper.objectives=[tokens_per_second]", "hydra.sweeper.direction=maximize")
    options = ("hydra.sweeper.sampler=grid", "optimizer.lr=1e-3,1e30")
    assert sweep("hydra/sweeper=optuna", *objective, *options) == 1
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert best["best_evaluated_params"] == {"optimizer.lr": "0.001"}


@pytest.mark.slow
def test_optuna_counts_a_diverged_point_of_another_objective_as_drawn(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=LOGS + DIVERGED)
    objectives = ("hydra.sweeper.objectives=[loss,tokens_per_second]", "hydra.sweeper.direction=[minimize,maximize]")
    assert sweep(*OPTUNA, *SPACE, *objectives, "hydra.sweeper.n_trials=2") == 1
    resume()
    assert len(trials(tmp_path / "sweep")) == 2


@pytest.mark.slow
def test_optuna_takes_several_objectives_from_the_metrics(
    optuna: Any, sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=LOGS + LOSS)
    objectives = ("hydra.sweeper.objectives=[loss,tokens_per_second]", "hydra.sweeper.direction=[minimize,maximize]")
    assert sweep(*OPTUNA, *SPACE, *objectives, "hydra.sweeper.n_trials=2", "hydra.sweeper.sampler=nsgaii") == 0
    assert [trial.values[1] for trial in trials(tmp_path / "sweep")] == [7.0, 7.0]
    assert len(yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())["solutions"]) == 1


@pytest.mark.slow
def test_optuna_stops_at_an_objective_that_no_record_has(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=LOGS + LOSS)
    with pytest.raises(TrainingError, match=r"objectives=\['val_loss'\].* with objectives of .*tokens_per_second"):
        sweep(*OPTUNA, *SPACE, "hydra.sweeper.objectives=[val_loss]", "hydra.sweeper.n_trials=3")
    with pytest.raises(TrainingError, match="lack an objective"):
        resume()
    assert read_sweep(tmp_path / "sweep")["status"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "qmc"])
def test_optuna_runs_with_every_sampler(optuna: Any, sweep: Any, tmp_path: Path, sampler: str) -> None:
    if sampler == "qmc":
        pytest.importorskip("scipy", reason="sampler=qmc needs SciPy")
    assert sweep(*OPTUNA, *SPACE, f"hydra.sweeper.sampler={sampler}", "hydra.sweeper.n_trials=2") == 0
    assert len(trials(tmp_path / "sweep")) == 2


@pytest.mark.slow
def test_optuna_matches_budgets_to_the_smallest_step(optuna: Any, sweep: Any, tmp_path: Path) -> None:
    assert sweep(*OPTUNA, "train.batch_size=2", "train.accumulation_steps=3,4", "hydra.sweeper.n_trials=1") == 0
    assert read_sweep(tmp_path / "sweep")["base_rows"] == 6


@pytest.mark.slow
def test_optuna_search_space_may_be_in_a_yaml_file(optuna: Any, sweep: Any, tmp_path: Path) -> None:
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    search = {"hydra": {"sweeper": {"n_trials": 2, "params": {"optimizer.lr": "tag(log,interval(1e-5,1e-2))"}}}}
    (tmp_path / "conf" / "experiment" / "search.yaml").write_text("# @package _global_\n" + yaml.safe_dump(search))
    assert sweep("hydra/sweeper=optuna", "experiment=search", f"hydra.searchpath=[file://{tmp_path / 'conf'}]") == 0
    assert len(trials(tmp_path / "sweep")) == 2


@pytest.mark.slow
def test_optuna_leaves_the_trial_of_an_interrupted_job_open(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=f"if fields['attempt'] == 1: os.kill(os.getppid(), signal.SIGTERM)\n{SAVES}")
    assert sweep(*OPTUNA, *SPACE, "hydra.sweeper.n_trials=1") == 75
    assert [trial.state.name for trial in trials(tmp_path / "sweep")] == ["RUNNING"]
    fake_jobs.set(default=LOSS)
    assert resume() == 0
    assert [trial.state.name for trial in trials(tmp_path / "sweep")] == ["COMPLETE"] and len(
        read_sweep(tmp_path / "sweep")["jobs"]
    ) == 1


PRUNED = (
    "hydra/sweeper=optuna", "hydra.sweeper.sampler=grid", "hydra.sweeper.seed=1", "train.max_steps=16", "train.eval_every=2",
    "optimizer.lr=1e-3,2e-3,3e-3",
)  # fmt: skip


def reported(sweep: Path) -> list[tuple[str, str, list[int]]]:
    """Return (learning rate, state, steps at which losses were reported) of each trial."""
    return [
        (trial.params["optimizer.lr"], trial.state.name, sorted(trial.intermediate_values)) for trial in trials(sweep)
    ]


@pytest.mark.slow
def test_optuna_prunes_jobs_at_rungs_and_counts_them(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=HALVED)
    assert sweep(*PRUNED, "hydra.sweeper.pruner=halving") == 0
    expected = [("0.001", "COMPLETE", [1, 2, 4]), ("0.002", "PRUNED", [1]), ("0.003", "PRUNED", [1])]
    assert reported(tmp_path / "sweep") == expected
    jobs = read_sweep(tmp_path / "sweep")["jobs"]
    assert [(job["status"], job["attempt"]) for job in jobs] == [("completed", 4), ("paused", 1), ("paused", 1)]
    assert resume() == 0 and reported(tmp_path / "sweep") == expected
    assert read_sweep(tmp_path / "sweep")["jobs"] == jobs


@pytest.mark.parametrize("lost", [1, *(pytest.param(lines, marks=pytest.mark.slow) for lines in (2, 3))])
def test_optuna_reports_each_rung_once_after_a_kill(
    optuna: Any, sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path, lost: int
) -> None:
    """The driver was killed before it wrote its last records; and a job was killed at its second rung."""
    fake_jobs.set(default=HALVED)
    fake_jobs.set_all({"optimizer.lr=0.001": f"if fields['attempt'] == 2: {KILLED}\n{HALVED}"})
    assert sweep(*PRUNED, "hydra.sweeper.pruner=halving") == 1
    log = tmp_path / "sweep" / "optuna.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-lost]))
    assert resume() == 0
    found = {lr: state for lr, state, _ in reported(tmp_path / "sweep") if state != "FAIL"}
    # a lost decision of the pruner is not made again: the job goes on to the next rung
    assert found["0.001"] == "COMPLETE" and {found["0.002"], found["0.003"]} <= {"PRUNED", "COMPLETE"}
    of_jobs = {job["overrides"]["optimizer.lr"]: job["status"] for job in read_sweep(tmp_path / "sweep")["jobs"]}
    assert {lr: {"PRUNED": "paused", "COMPLETE": "completed"}[state] for lr, state in found.items()} == of_jobs
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [(line["trial_id"], line["step"]) for line in lines if "intermediate_value" in line]
    assert steps and len(set(steps)) == len(steps)
