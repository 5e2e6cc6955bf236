"""A sweep as a person runs it: killed at any moment, continued, extended, stopped; every job to the bit as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from runner.engine.verify_resume import diff_run_dirs

WORDS = [
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16", "model.intermediate_size=32",
    "model.dropout=0.1", "data.max_length=32", "data.val_path=null", "data.val_fraction=0.2", "init_from=scratch", "train.batch_size=2", "train.max_steps=60", "train.log_every=4",
    "train.save_every=8", "train.eval_every=20", "train.sample_every=0", "device=cpu", "tracker.console=quiet",
]  # fmt: skip
SWEPT = ["optimizer.lr=1e-3,2e-3", "train.accumulation_steps=1,4"]
NAMES = {f"optimizer.lr={lr},train.accumulation_steps={steps}" for lr in ("0.001", "0.002") for steps in (1, 4)}

WAIT = 300  # seconds; ten on a quiet machine

Launch = Callable[..., subprocess.Popen]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "the lake of Oru lies north of the old mill " * (1 + i % 3)}) + "\n" for i in range(40)))
    return file


@pytest.fixture(scope="module")
def launch(checkout: Path, rows: Path) -> Launch:
    def launch(*words: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(checkout / "runner" / "train.py"), *words],
            cwd=rows.parent,
            stdout=subprocess.DEVNULL,
            stderr=open(rows.parent / "said", "w+"),
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )

    return launch


def first_words(folder: Path, rows: Path, *swept: str) -> list[str]:
    return ["-m", *WORDS, f"data.path={rows}", *(swept or SWEPT), f"hydra.sweep.dir={folder}", "hydra.launcher.workers=2"]


@pytest.fixture(scope="module")
def whole(launch: Launch, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody disturbed."""
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    assert launch(*first_words(folder, rows)).wait(WAIT) == 0, (rows.parent / "said").read_text()
    return folder


def sweep_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())


def statuses(folder: Path) -> dict[str, str]:
    return {job["name"]: job["status"] for job in sweep_of(folder)["jobs"]}


def record(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text()) if (run / "run.json").exists() else {}


def steps(run: Path) -> list[tuple[str, int]]:
    file = run / "metrics.jsonl"
    return [(line["kind"], line["step"]) for line in map(json.loads, file.read_text().splitlines())] if file.exists() else []


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def same_as(whole: Path, folder: Path) -> None:
    """Every job of `folder` ended in the bits of the undisturbed one, and none of its steps was taken twice."""
    assert statuses(folder) == statuses(whole)
    for name in statuses(whole):
        assert diff_run_dirs(whole / name, folder / name) == []
        assert steps(folder / name) == steps(whole / name)


def test_every_job_stands_in_a_folder_named_by_its_words(whole: Path) -> None:
    told = sweep_of(whole)
    assert told["status"] == "completed" and set(statuses(whole)) == NAMES and set(statuses(whole).values()) == {"completed"}
    assert told["swept"] == {"optimizer.lr": ["0.001", "0.002"], "train.accumulation_steps": ["1", "4"]}
    assert all(isinstance(job["loss"], float) and job["loss"] == record(whole / job["name"])["metrics"]["val_loss"] for job in told["jobs"])
    assert (whole / "report.html").is_file() and (whole / "leaderboard.csv").is_file()


def test_jobs_with_larger_steps_take_fewer_of_them_and_say_so(whole: Path) -> None:
    name = "optimizer.lr=0.001,train.accumulation_steps=4"
    assert {"train.max_steps=15", "train.eval_every=5"} <= set(yaml.safe_load((whole / name / ".hydra" / "overrides.yaml").read_text()))
    assert record(whole / name)["step"] == 15
    assert record(whole / name)["tokens"] == pytest.approx(record(whole / "optimizer.lr=0.001,train.accumulation_steps=1")["tokens"], rel=0.05)


def test_a_sweep_killed_once_and_continued_costs_no_bit_and_runs_no_job_twice(whole: Path, launch: Launch, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    driver = launch(*first_words(folder, rows))
    first, other = (folder / f"optimizer.lr=0.001,train.accumulation_steps={n}" for n in (1, 4))
    until(lambda: steps(first) and steps(other))
    driver.kill()
    driver.wait()
    before = statuses(folder)
    assert "running" in before.values() and "new" in before.values()
    assert launch(f"resume={folder}").wait(WAIT) == 0, (rows.parent / "said").read_text()
    same_as(whole, folder)
    assert [record(folder / name)["attempt"] for name, status in before.items() if status in ("new", "completed")] == [1, 1]


def test_a_finished_sweep_is_not_touched(whole: Path, launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(whole, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert launch(f"resume={folder}").wait(WAIT) == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_job_continued_by_hand_is_marked_once_the_sweep_looks_again_and_the_sweep_s_own_words_are_not(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner.reporting import leaderboard, read_results
    from runner.run_dir import resume
    from runner.sweep import command, session

    folder = tmp_path / "more"
    shutil.copytree(whole, folder)
    first = folder / "optimizer.lr=0.001,train.accumulation_steps=1"
    with resume.persisting_overrides(resume.plan_resume(first, ["train.max_steps=70"])):
        told = record(first)
        (first / "run.json").write_text(json.dumps({**told, "step": 70, "metrics": {**told["metrics"], "val_loss": 1.0}}))
    command.resume_sweep(folder, [], [], lambda: pytest.fail("there is nothing to run"))
    assert sum("train.max_steps=70" in line for line in (folder / "leaderboard.csv").read_text().splitlines()) == 1
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(session, "current_sessions", [])
    command.resume_sweep(folder, ["train.max_steps=80"], [], lambda: None)
    for job in sweep_of(folder)["jobs"]:
        with resume.persisting_overrides(resume.plan_resume(folder / job["name"], job["pending_overrides"])):
            pass
    assert {job.name: job.manual_overrides for job in read_results.read_sweep_results(folder).jobs} == {name: ["train.max_steps=70"] * (name == first.name) for name in NAMES}
    assert "continued with train.max_steps=70" in leaderboard.leaderboard_text(folder)


def test_looking_at_a_sweep_shows_the_job_that_would_run_next_and_writes_nothing(whole: Path, program: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a sweep"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "optimizer.lr=0.002,train.accumulation_steps=4")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def seen(*words: str) -> tuple[float, int, int]:
        done = program(f"resume={folder}", *words, "--cfg", "job")
        assert done.returncode == 0 and "one job of this sweep: " in done.stderr, done.stderr
        other = shlex.split(done.stderr.partition("another: ")[2].splitlines()[0])[0].removeprefix("resume=")
        assert Path(other, "run.json").is_file()
        tree = yaml.safe_load(done.stdout)
        return tree["optimizer"]["lr"], tree["train"]["accumulation_steps"], tree["train"]["max_steps"]

    assert seen() == (0.002, 4, 15)
    assert seen("train.max_steps=80", "train.accumulation_steps=1") == (0.002, 1, 80)
    assert seen("optimizer.lr=3e-3") == (0.003, 4, 15)
    told = program(f"resume={folder}", "--info", "defaults-tree", "optimizer.lr=1e-3")
    assert told.returncode == 0 and "precision: fp32" in told.stdout, told.stderr
    assert program(f"resume={folder}", "--cfg", "job", "model.hidden_sizes=2").returncode == 2
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_new_points_are_trained_and_the_others_left_alone(whole: Path, launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(whole, folder)
    driver = launch(f"resume={folder}", "optimizer.lr=1e-3,3e-3", "train.accumulation_steps=4")
    assert driver.wait(WAIT) == 0
    assert set(statuses(folder)) == NAMES | {"optimizer.lr=0.003,train.accumulation_steps=4"}
    assert record(folder / "optimizer.lr=0.003,train.accumulation_steps=4")["step"] == 15
    assert {record(folder / name)["attempt"] for name in NAMES} == {1}


def test_points_that_are_added_are_told_where_they_cannot_see_the_same_rows(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from runner.sweep import command, session

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(session, "current_sessions", [])
    for extra, warned in ((["optimizer.lr=3e-3"], ""), (["train.accumulation_steps=16"], "60 x 2 = 120, 15 x 8 = 120, 4 x 32 = 128")):
        shutil.copytree(whole, folder := tmp_path / extra[0])
        with pytest.raises(SystemExit):
            command.resume_sweep(folder, extra, [], lambda: None)
        said = capsys.readouterr().err
        assert warned in said and ("do not see the same rows" in said) == bool(warned)


REFUSED = (["seed=1,2"], ["optimizer.lrr=1"], ["optimizer.lr=1e-3,x"], ["sweep.match_budget=steps"], ["hydra.sweep.dir=elsewhere"], ["train.max_steps=x"])


def test_words_a_sweep_cannot_take_change_nothing(whole: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.sweep import command

    before = (whole / "sweep.json").read_bytes()
    for extra in REFUSED:
        with pytest.raises(ValueError) as refusal:
            command.resume_sweep(whole, extra, [], lambda: pytest.fail("it went on"))
        assert len(refusal.value.args) == 3
    assert (whole / "sweep.json").read_bytes() == before


@pytest.mark.parametrize(
    "extra",
    [
        ["train.max_steps=80", "model.hidden_size=64"],
        ["data.max_length=16", "optimizer.lr=7e-4"],
        ["optimizer.weight_decay=0.2"],
        ["stage=sft", "train.epochs=2"],
        # these name a length and train no step further
        ["train.max_steps=60", "optimizer.weight_decay=0.2"],
        ["train.epochs=7", "train.patience=3", "optimizer.weight_decay=0.2"],
    ],
)
def test_a_word_that_a_job_which_has_begun_cannot_take_changes_nothing(whole: Path, extra: list[str]) -> None:
    from runner.sweep import command

    before = (whole / "sweep.json").read_bytes()
    with pytest.raises(ValueError) as refusal:
        command.resume_sweep(whole, extra, [], lambda: pytest.fail("it went on"))
    if extra[0] == "stage=sft":
        assert refusal.value.args == ("the jobs of a sweep keep their stage", "stage=sft", f"start another sweep with init_from={whole}/<job>")
    assert len(refusal.value.args) == 3 and any(word in refusal.value.args[1] for word in ("hidden_size", "max_length", "weight_decay", "stage"))
    assert (whole / "sweep.json").read_bytes() == before


def test_a_length_behind_which_jobs_stand_is_refused_but_for_one_that_was_continued_by_hand(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from runner.run_dir import resume
    from runner.sweep import command, session

    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(session, "current_sessions", [])
    shutil.copytree(whole, folder := tmp_path / "sweep")
    before = (folder / "sweep.json").read_bytes()
    with pytest.raises(ValueError, match="stand at step 60 already"):
        command.resume_sweep(folder, ["train.max_steps=40"], [], lambda: pytest.fail("it went on"))
    assert (folder / "sweep.json").read_bytes() == before
    first = folder / "optimizer.lr=0.001,train.accumulation_steps=1"
    with resume.persisting_overrides(resume.plan_resume(first, ["train.max_steps=90"])):
        (first / "run.json").write_text(json.dumps({**record(first), "step": 90}))
    command.resume_sweep(folder, ["train.max_steps=80"], [], lambda: None)
    assert {job["name"]: [word for word in job.get("pending_overrides", []) if "max_steps" in word] for job in sweep_of(folder)["jobs"]} == {
        name: [] if name == first.name else [f"train.max_steps={80 if name.endswith('=1') else 20}"] for name in NAMES
    }
    assert "was continued by hand to step 90" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["hydra.callbacks.x._target_=os.system", "data.path=${oc.env:HOME}", "hydra/launcher=x._target_", "hydra.launcher.setup=[rm]"])
def test_nothing_in_a_sweep_s_folder_can_reach_outside(whole: Path, tmp_path: Path, word: str) -> None:
    from runner.sweep import command

    shutil.copy(whole / "sweep.json", tmp_path)
    told = sweep_of(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({**told, "overrides": [*told["overrides"], word]}))
    with pytest.raises(ValueError, match="reach outside"):
        command.resume_sweep(tmp_path, [], [], lambda: pytest.fail("it went on"))


def test_a_sweep_never_stands_there_with_fewer_jobs_than_it_has(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.sweep import command, session, state

    seen: list[int] = []
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(session, "current_sessions", [])
    monkeypatch.setattr(state, "write_json", lambda path, fields: seen.append(len(fields["jobs"])) if path.name == "sweep.json" else None)
    with pytest.raises(SystemExit) as end:
        command.start_sweep([f"data.path={rows}", *SWEPT, f"hydra.sweep.dir={tmp_path / 'sweep'}"], ["-m"], lambda: None)
    assert end.value.code == 75 and set(seen) == {4}


def test_a_choice_whose_file_is_gone_is_composed_from_the_sweep_s_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.config.compose import compose_with_run_dir
    from runner.sweep import command, session

    folder, seen = tmp_path / "sweep", []
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(session, "current_sessions", [])
    with pytest.raises(SystemExit):
        command.start_sweep(["optimizer=muon,adamw", f"hydra.sweep.dir={folder}"], ["-m"], lambda: None)
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("muon", "gone"))  # as if conf/ had no such file any more
    (folder / ".hydra" / "conf" / "optimizer" / "muon.yaml").rename(folder / ".hydra" / "conf" / "optimizer" / "gone.yaml")

    def app() -> None:
        conf = Path(sys.argv[sys.argv.index("--config-path") + 1])
        seen.append(compose_with_run_dir(["optimizer=gone"], conf)[0].optimizer.name)

    for extra in ([], ["optimizer=gone"]):
        with pytest.raises(SystemExit):
            command.resume_sweep(folder, extra, [], app)
    assert seen == ["muon"] * 2


EDITED = """
import json, sys, yaml
from pathlib import Path
from runner.launch import sweep, underway
file, folder = Path("conf/optimizer/adamw.yaml"), Path(sys.argv[1])
before = file.read_text()
def app():
    now = underway.current[-1]
    file.write_text(before.replace("weight_decay: 0.1", "weight_decay: 0.7"))
    assert file.read_text() != before
    words = [now.child_words(job) for job in now.state.jobs]
    print(json.dumps([words, [yaml.safe_load((folder / job["name"] / ".hydra" / "config.yaml").read_text())["optimizer"]["weight_decay"] for job in now.state.jobs]]))
try:
    sweep.enter(["optimizer=adamw", "seed=1,2", f"hydra.sweep.dir={folder}"], ["-m"], app)
finally:
    file.write_text(before)
"""


def test_a_file_of_conf_that_changes_while_a_sweep_runs_changes_no_job(checkout: Path, tmp_path: Path) -> None:
    """Each job is composed when its turn comes, which may be a day after the first."""
    folder = tmp_path / "sweep"
    done = subprocess.run([sys.executable, "-c", EDITED, str(folder)], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 75, done.stderr
    words, decays = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[")))
    assert words == [[f"resume={folder}/seed={seed}"] for seed in (1, 2)] and decays == [0.1, 0.1]


def test_all_jobs_of_a_sweep_start_from_the_same_weights_whatever_run_ends_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.config.compose import compose_config
    from runner.run_dir import initial_weights
    from runner.sweep import command

    shared, began = initial_weights.compatibility_fingerprints(compose_config(["stage=sft"])), []
    monkeypatch.setattr(initial_weights, "REPO_ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(command, "current_sessions", [])

    def finished(name: str) -> str:
        (run := tmp_path / "outputs" / "day" / name / "model").mkdir(parents=True)
        (run.parent / "run.json").write_text(json.dumps({"status": "completed", "stage": "pretrain", "fingerprints": shared, "ended": name}))
        return str(run.parent)

    def app() -> None:
        finished(f"2026-11-22T0{len(began)}:00:00+00:00")
        for job in command.current_sessions[-1].state.jobs:
            command.current_sessions[-1].child_words(job)
            began.append(yaml.safe_load((tmp_path / "it's" / job["name"] / ".hydra" / "config.yaml").read_text())["init_from"])

    first, folder = finished("2026-11-21T10:00:00+00:00"), tmp_path / "it's"
    for go in (
        lambda: command.start_sweep(["stage=sft", "seed=1,2", f'hydra.sweep.dir="{folder}"'], ["-m"], app),
        lambda: command.resume_sweep(folder, ["seed=3"], [], app),
    ):
        with pytest.raises(SystemExit):
            go()
    assert began == [first] * 5 and [*sweep_of(folder)["init_from"].values()] == [first]


def test_what_could_reach_outside_is_not_written_down(capsys: pytest.CaptureFixture) -> None:
    from runner.sweep.validation import storable_overrides

    words = [
        "seed=1",
        "hydra/launcher=joblib",
        "hydra.launcher.workers=2",
        "hydra.launcher.setup=[rm]",
        "hydra.sweeper.storage=postgresql://there",
        "hydra.callbacks.x=1",
    ]
    assert storable_overrides(words) == words[:3] and capsys.readouterr().err.count("type it again") == 3
    with pytest.raises(ValueError, match="looked up"):
        storable_overrides(["data.path=${oc.env:HOME}"])


def test_a_mistake_in_any_job_is_found_before_the_first_is_started(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from runner.sweep import command

    for swept in (
        ["optimizer.lr=1e-3,x"],
        ["data.path=data/samples/pretrain.jsonl,nowhere.jsonl"],
        ["train.batch_size=1,2", "train.max_steps=0", "sweep.match_budget=steps"],
        ["optimizer.lr=1e-3,1e-4", "seed=1,2,3", "sweep.zip=[optimizer.lr,seed]"],
        ["optimizer.lr=interval(1e-5,1e-3)"],
        ["optimizer.lr=1e-3,1e-4", "hydra.launcher.workers=0"],
        ["init_from=scratch,/nowhere"],
        ["seed=glob(*)"],
    ):
        with pytest.raises(ValueError) as refusal:
            command.start_sweep([*swept, f"hydra.sweep.dir={tmp_path / 'sweep'}"], ["-m"], lambda: pytest.fail("it went on"))
        assert len(refusal.value.args) == 3
    with pytest.raises(ValueError, match="put quotes around"):
        command.start_sweep(["seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep/seed=1"], ["-m"], lambda: pytest.fail("it went on"))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.slow
def test_the_words_of_conf_as_they_were_hold_for_jobs_that_had_not_begun(checkout: Path, whole: Path, launch: Launch, rows: Path, tmp_path: Path) -> None:
    folder, schedule = tmp_path / "sweep", checkout / "conf" / "schedule" / "cosine.yaml"
    driver = launch(*first_words(folder, rows))
    until(lambda: "running" in statuses(folder).values() if (folder / "sweep.json").exists() else False)
    driver.kill()
    driver.wait()
    text = schedule.read_text()
    try:
        schedule.write_text(text.replace("min_lr_ratio: 0.1", "min_lr_ratio: 0.9"))
        assert schedule.read_text() != text
        assert launch(f"resume={folder}").wait(WAIT) == 0, (rows.parent / "said").read_text()
    finally:
        schedule.write_text(text)
    same_as(whole, folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_every_job_saves_and_the_line_to_continue_is_printed(whole: Path, launch: Launch, rows: Path, tmp_path: Path, number: int) -> None:
    folder = tmp_path / "stopped"
    driver = launch(*first_words(folder, rows))
    until(lambda: steps(folder / "optimizer.lr=0.001,train.accumulation_steps=1"))
    driver.send_signal(number)
    assert driver.wait(WAIT) == 75
    assert f"resume={folder}" in (rows.parent / "said").read_text()
    assert sweep_of(folder)["status"] == "interrupted" and set(statuses(folder).values()) <= {"interrupted", "new", "completed"}
    assert launch(f"resume={folder}").wait(WAIT) == 0
    same_as(whole, folder)


@pytest.mark.slow
def test_more_steps_continue_every_job_each_by_its_share(whole: Path, launch: Launch, rows: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    words = [word.replace("train.max_steps=60", "train.max_steps=80") for word in first_words(longer, rows)]
    assert launch(*words, "schedule=constant").wait(WAIT) == 0
    folder = tmp_path / "sweep"
    assert launch(*first_words(folder, rows), "schedule=constant").wait(WAIT) == 0
    assert launch(f"resume={folder}", "train.max_steps=80").wait(WAIT) == 0
    assert {name: record(folder / name)["step"] for name in NAMES} == {name: 80 if name.endswith("1") else 20 for name in NAMES}


@pytest.mark.slow
def test_a_job_that_diverges_is_failed_with_an_infinite_loss_and_is_not_tried_again(launch: Launch, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    assert launch(*first_words(folder, rows, "optimizer.lr=1e-3,1e30"), "optimizer.grad_clip=0").wait(WAIT) == 1
    good, bad = sweep_of(folder)["jobs"]
    assert good["status"] == "completed" and (bad["status"], bad["loss"]) == ("failed", "inf") and "not finite" in bad["error"] and bad["last_lines"]
    assert launch(f"resume={folder}").wait(WAIT) == 1
    assert record(folder / bad["name"])["attempt"] == 1


KILLS = 10


@pytest.mark.slow
def test_ten_cold_kills_of_driver_child_or_both_cost_no_bit(launch: Launch, rows: Path, tmp_path: Path) -> None:
    swept = ("optimizer.lr=1e-3,2e-3,3e-3", "train.accumulation_steps=1,4")
    whole, chance, seen = tmp_path / "whole", random.Random(10), Counter[str]()
    began = time.monotonic()
    assert launch(*first_words(whole, rows, *swept)).wait(WAIT) == 0
    all_of_it = time.monotonic() - began
    while seen["kills"] < KILLS:
        seen["sweeps"] += 1
        folder = tmp_path / f"killed{seen['sweeps']}"
        done: dict[str, int] = {}  # attempts of the jobs that were completed at some time
        while True:
            driver = launch(*([f"resume={folder}"] if (folder / "sweep.json").exists() else first_words(folder, rows, *swept)))
            seen["launches"] += 1
            try:
                code = driver.wait(all_of_it * chance.uniform(0.05, 0.4) if seen["kills"] < KILLS else WAIT)
            except subprocess.TimeoutExpired:
                who, jobs = ("driver", "child", "both")[seen["kills"] % 3], children_of(driver.pid)
                victims = {"driver": [driver.pid], "child": jobs[:1], "both": [driver.pid, *jobs]}[who]
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                seen["kills"] += bool(victims)
                seen[who] += bool(victims)
                code = driver.wait(WAIT)  # one that lost a child goes on with the others, and fails
            assert code in (0, 1, -9), (rows.parent / "said").read_text()
            if (folder / "sweep.json").exists():
                done = {name: record(folder / name)["attempt"] for name, status in statuses(folder).items() if status == "completed"} | done
            if code == 0:
                break
        same_as(whole, folder)
        assert {name: record(folder / name)["attempt"] for name in done} == done, "a job that was complete was run again"
    print(dict(seen))
    assert seen["driver"] and seen["child"] and seen["both"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
