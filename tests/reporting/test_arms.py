"""compare.py: better, worse or not told apart over seeds; what cannot be compared is refused; text, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_fixtures import TINY_RUN, Call, is_user_error
from report_fixtures import EVALUATION, FINGERPRINTS, make_run
from sweep_fixtures import job, training, write_sweep

from common.errors import NOT_TOLD_APART, OTHER_IS_BETTER, UserError
from runner.reporting.arms import ArmComparison, compare_arms, comparison_json, comparison_text
from runner.reporting.read_sweep import read_sweep_results

LOW, HIGH = [1.0, 1.02, 1.04], [2.0, 2.02, 2.04]


def write_arm(folder: Path, losses: list[float], lr: float = 0.1, first_seed: int = 1, **fields: Any) -> str:
    """Write a run per loss, with a seed of its own; return them as they are typed."""
    runs = []
    for seed, loss in enumerate(losses, start=first_seed):
        export = {"weights": "best", "step": 50, "loss": loss}
        runs.append(make_run(folder / f"run-{seed}", settings={"lr": lr}, **{"export": export, **fields}))
        config = json.loads((runs[-1] / ".hydra" / "config.yaml").read_text())
        (runs[-1] / ".hydra" / "config.yaml").write_text(json.dumps(config | {"seed": seed}))
        (runs[-1] / ".hydra" / "overrides.yaml").write_text(f"[optimizer.lr={lr}, seed={seed}]")
    return ",".join(map(str, runs))


def compared(tmp_path: Path, **arms: list[float]) -> ArmComparison:
    return compare_arms(
        {name: write_arm(tmp_path / name, losses, lr) for lr, (name, losses) in enumerate(arms.items(), start=1)}
    )


def test_arms_outside_of_the_spread_are_better_and_worse(tmp_path: Path) -> None:
    better = compared(tmp_path / "1", a=LOW, b=HIGH)
    assert better.verdict == "better" and "a is better than b\nb - a: +1.0000, from +0.95" in comparison_text(better)
    worse = compared(tmp_path / "2", a=HIGH, b=LOW)
    assert worse.verdict == "worse" and "a is worse: b is better than a\nb - a: -1.0000" in comparison_text(worse)
    found = comparison_json(worse)
    (difference,) = found["differences"]
    assert found["best"] == "b" and difference["difference"] == pytest.approx(-1) and difference["level"] == 0.95
    assert found["arms"]["a"]["seeds"] == 3 and found["arms"]["a"]["losses"] == HIGH
    assert found["settings"] == {"optimizer.lr": ["1", "2"]} and found["evaluation"]["rows"] == 80
    assert difference["needed_seeds"] is None and difference["interval"][1] < 0


def test_arms_inside_of_the_spread_say_how_many_seeds_they_need(tmp_path: Path) -> None:
    comparison = compared(tmp_path, a=[1.0, 1.2, 1.4], b=[1.1, 1.3, 1.5])
    (difference,) = comparison.differences
    # 80 % power at two standard deviations: 2 * (2.8 * 0.2 / 0.1) ** 2, and Student's t asks for one more
    assert comparison.verdict == "not told apart" and difference.needed_seeds == 64
    assert "about 64 seeds per side decide a difference of this size" in comparison_text(comparison)
    assert "--multirun seed=4" in comparison.arms[0].add_seeds


def test_arm_of_one_seed_decides_nothing_and_says_what_is_missing(tmp_path: Path) -> None:
    comparison = compared(tmp_path, a=[1.0], b=HIGH)
    text = comparison_text(comparison)
    assert comparison.verdict == "not told apart"
    assert "not told apart: one seed in a: the spread over seeds is not known" in text
    assert "more seeds of a: python runner/train.py optimizer.lr=1 --multirun seed=2,3" in text
    assert "more seeds of b" not in text and comparison_json(comparison)["differences"][0]["interval"] is None


def test_three_arms_share_the_error_and_one_must_beat_all_others(tmp_path: Path) -> None:
    comparison = compared(tmp_path / "1", a=LOW, b=HIGH, c=[1.01, 1.03, 1.05])
    assert comparison.verdict == "not told apart"
    assert [(each.first.name, each.second.name, each.is_real) for each in comparison.differences] == [
        ("a", "b", True),
        ("a", "c", False),
    ]
    assert comparison.differences[0].level == pytest.approx(0.975)
    assert compared(tmp_path / "2", a=HIGH, b=[3.0, 3.1, 3.2], c=LOW).verdict == "worse"


def test_arm_of_a_sweep_is_its_best_point_with_all_seeds(tmp_path: Path) -> None:
    jobs = [
        job(
            {"optimizer.lr": lr, "seed": str(seed)},
            training(loss),
            run={"export": {"weights": "best", "step": 40, "loss": loss}, "evaluation": EVALUATION},
        )
        for lr, losses in (("1", HIGH), ("2", LOW))
        for seed, loss in enumerate(losses, start=1)
    ]
    sweep = write_sweep(tmp_path / "sweep", jobs)
    comparison = compare_arms({"a": str(sweep), "b": write_arm(tmp_path / "b", HIGH)})
    assert comparison.verdict == "better" and comparison.arms[0].loss.mean == pytest.approx(1.02)
    assert "a is the best of 2 points of its sweep" in comparison.notes[-1]


def test_best_point_leaves_out_a_seed_that_the_budget_has_paused(tmp_path: Path) -> None:
    jobs = []
    for lr, loss in (("1", 2.0), ("2", 1.0)):
        run = {"export": {"weights": "best", "step": 40, "loss": loss}, "evaluation": EVALUATION}
        jobs.append(job({"optimizer.lr": lr}, training(loss), run=run))
    jobs.append(job({"optimizer.lr": "2", "seed": "43"}, training(0.5, 20), status="paused"))
    sweep = write_sweep(tmp_path / "sweep", jobs, sweeper="halving")
    content = json.loads((sweep / "sweep.json").read_text())
    del content["swept"]["seed"]  # the sweep has added it
    (sweep / "sweep.json").write_text(json.dumps(content))
    best = read_sweep_results(sweep).best
    assert best is not None and best.name == "optimizer.lr=2"
    comparison = compare_arms({"a": str(sweep), "b": write_arm(tmp_path / "b", HIGH)})
    assert [run.folder.name for run in comparison.arms[0].runs] == ["optimizer.lr=2"]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "rows": ({"evaluation": EVALUATION | {"data": "e2"}}, "judged with different evaluation rows", "data.val_path"),
    "tokenizer": ({"evaluation": EVALUATION | {"tokenizer": "t2"}}, "judged with different tokenizers", "tokenizer"),
    "loss": ({"evaluation": EVALUATION | {"loss": {"stage.beta": 1}}}, "with different losses: stage.beta", "stage"),
    "unfinished": ({"status": "interrupted"}, "not completed: interrupted", "resume="),
    "diverged": ({"status": "failed", "outcome": "diverged"}, "not completed: diverged", "resume="),
    "no loss": ({"export": {"weights": "last", "step": 50, "loss": None}}, "has no evaluation loss", "data.val_"),
    "no evaluation": ({"evaluation": None}, "has no evaluation loss", "train.final_eval_rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_that_cannot_be_compared_are_refused(name: str, tmp_path: Path) -> None:
    fields, message, fix = REFUSED[name]
    with pytest.raises(UserError, match=message) as raised:
        compare_arms({"a": write_arm(tmp_path / "a", LOW), "b": write_arm(tmp_path / "b", HIGH, **fields)})
    assert fix in raised.value.fix


def test_run_that_still_trains_is_compared_when_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.reporting.runs.run_status", lambda fields: "running")
    with pytest.raises(UserError, match="not completed: running") as raised:
        compare_arms({"a": write_arm(tmp_path / "a", LOW), "b": write_arm(tmp_path / "b", HIGH)})
    assert raised.value.fix == "compare it when it has ended"


def test_runs_of_one_arm_may_differ_in_settings_that_change_no_number(tmp_path: Path) -> None:
    arms = {"a": write_arm(tmp_path / "a", LOW), "b": write_arm(tmp_path / "b", HIGH)}
    file = Path(arms["a"].split(",")[0]) / ".hydra" / "config.yaml"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"sweep": {"seeds": 5}, "train": {"save_every": 7, "sample_every": 3}}))
    assert compare_arms(arms).verdict == "better"
    file.write_text(json.dumps(config | {"train": {"eval_every": 7}}))  # chooses among other evaluations
    with pytest.raises(UserError, match="the runs of a differ in more than the seed: train.eval_every"):
        compare_arms(arms)


def test_runs_judged_on_few_rows_are_refused(tmp_path: Path) -> None:
    few = EVALUATION | {"rows": 9}
    arms = {name: write_arm(tmp_path / name, LOW, evaluation=few) for name in "ab"}
    with pytest.raises(UserError, match="on 9 rows: not told apart, at least 10 validation rows"):
        compare_arms(arms)


def test_runs_of_one_arm_differ_in_their_seed_alone(tmp_path: Path) -> None:
    first, second = write_arm(tmp_path / "a", LOW), write_arm(tmp_path / "b", HIGH, lr=0.2, first_seed=4)
    other = write_arm(tmp_path / "c", HIGH)
    with pytest.raises(UserError, match=r"the runs of a differ in more than the seed: optimizer.lr is 0.1, 0.2"):
        compare_arms({"a": f"{first},{second}", "b": other})
    with pytest.raises(UserError, match="a has several runs with seed=1"):
        compare_arms({"a": f"{first},{other}", "b": second})
    with pytest.raises(UserError, match="a and b have the same run"):
        compare_arms({"a": first, "b": first})
    foreign = write_arm(tmp_path / "d", HIGH, first_seed=7, fingerprints=FINGERPRINTS | {"tokenizer": "t2"})
    with pytest.raises(UserError, match="tokenizer"):
        compare_arms({"a": f"{first},{foreign}", "b": second})


def model_folder(folder: Path, loss: float, tokenizer: str = "{}", **record: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(tokenizer)
    fields = {"metric": "perplexity", "data": "x.jsonl", "loss": loss, "loss_tokens": 500} | record
    (folder / "evaluations.jsonl").write_text(json.dumps(fields) + "\n")
    return str(folder)


def test_model_folders_are_compared_by_their_results_of_evaluate(tmp_path: Path) -> None:
    first = ",".join(model_folder(tmp_path / f"a{loss}", loss) for loss in LOW)
    second = ",".join(model_folder(tmp_path / f"b{loss}", loss) for loss in HIGH)
    comparison = compare_arms({"a": first, "b": second})
    assert comparison.verdict == "better" and "judged on 500 tokens by evaluate.py on x.jsonl" in comparison_text(
        comparison
    )
    again = comparison.arms[0].runs + comparison.arms[1].runs
    for data in ("z.jsonl", "x.jsonl"):  # x.jsonl is evaluated again after z.jsonl
        for run in again:
            fields = {"metric": "perplexity", "data": data, "loss": float(run.folder.name[1:]), "loss_tokens": 500}
            with (run.folder / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps(fields) + "\n")
    assert "by evaluate.py on x.jsonl" in comparison_text(compare_arms({"a": first, "b": second}))
    with pytest.raises(UserError, match="no result of evaluate.py on the same data"):
        compare_arms({"a": first, "b": model_folder(tmp_path / "other", 1.0, data="y.jsonl")})
    with pytest.raises(UserError, match="no result of evaluate.py on the same data"):
        compare_arms({"a": first, "b": model_folder(tmp_path / "rounded", 1.0, dtype="bf16")})
    with pytest.raises(UserError, match="different tokenizers"):
        compare_arms({"a": first, "b": model_folder(tmp_path / "tokens", 1.0, tokenizer="[]")})


def test_compare_command_has_an_exit_code_per_verdict(tmp_path: Path, call_command: Call) -> None:
    low, high = write_arm(tmp_path / "low", LOW), write_arm(tmp_path / "high", HIGH, lr=0.2)
    done = call_command("compare.py", f"a={low}", f"b={high}", "json=true")
    assert (done.returncode, json.loads(done.stdout)["verdict"], done.stderr) == (0, "better", "")
    assert call_command("compare.py", f"a={high}", f"b=[{low}]").returncode == OTHER_IS_BETTER
    one = write_arm(tmp_path / "one", [0.5], lr=0.3)
    done = call_command("compare.py", f"a={low}", f"b={one}", "json=true")
    assert done.returncode == NOT_TOLD_APART and len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["arms"]["b"]["add_seeds"].endswith("--multirun seed=2,3")
    for typed, fix in ((["a=x"], "a=DIR b=DIR"), ([f"a={low}", "b=nowhere"], "b=nowhere"), (["a=x", "z=y"], "z")):
        done = call_command("compare.py", *typed)
        assert is_user_error(done) and fix in done.stderr


@pytest.mark.slow
def test_compare_command_of_real_runs(rows: str, call: Call, call_command: Call) -> None:
    common = [*TINY_RUN, rows, "data.val_fraction=0.3", "train.eval_every=1", "init_from=scratch"]
    for lr, seed in (("1e-3", 1), ("1e-3", 2), ("3e-1", 1), ("3e-1", 2)):
        assert call(*common, f"optimizer.lr={lr}", f"seed={seed}", f"hydra.run.dir={lr}-{seed}").returncode == 0
    done = call_command("compare.py", "a=1e-3-1,1e-3-2", "b=3e-1-1,3e-1-2", "json=true")
    found = json.loads(done.stdout)
    assert done.returncode in (0, OTHER_IS_BETTER, NOT_TOLD_APART) and found["evaluation"]["rows"] == 12
    assert found["settings"]["optimizer.lr"] == ["0.001", "0.3"] and found["arms"]["a"]["seeds"] == 2
    done = call_command("compare.py", "a=1e-3-1", "b=3e-1-1")
    assert done.returncode == NOT_TOLD_APART and "the spread over seeds is not known" in done.stdout
    done = call_command("compare.py", "a=1e-3-1,3e-1-2", "b=3e-1-1")
    assert is_user_error(done) and "differ in more than the seed: optimizer.lr" in done.stderr


def test_copies_of_one_model_are_no_seeds(tmp_path: Path) -> None:
    copies = ",".join(model_folder(tmp_path / name, 2.0) for name in ("a1", "a2"))
    with pytest.raises(UserError, match="a has several runs with the same loss"):
        compare_arms({"a": copies, "b": model_folder(tmp_path / "b", 3.0)})
