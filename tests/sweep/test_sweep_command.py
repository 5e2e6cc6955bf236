"""`train.py --multirun` and `resume=SWEEP` through Hydra and its plugins; a job is a few lines of Python."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_jobs import DIVERGED, FLAKY, GOOD, SAVES, FakeJobs, read_run, read_sweep, run_sweep, wait_until
from fake_jobs import REFUSED as REFUSED_JOB
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper

from common.errors import UserError
from common.registry import PLUGINS_ENV
from runner.cli.show_config import show_sweep_config
from runner.config import compose
from runner.config.compose import compose_config, compose_tree
from runner.launch import auto_choice, initial_weights
from runner.sweep import command, validation
from runner.sweep.backends import LAUNCHERS
from runner.sweep.session import SweepSession
from runner.sweep.state import SweepState, is_safe_override, storable_overrides


def statuses(folder: Path) -> dict[str, str]:
    return {job["name"]: job["status"] for job in read_sweep(folder)["jobs"]}


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Starting


def test_plugins_are_found_by_the_scan_of_hydra() -> None:
    compose_tree([])
    plugins = [*Plugins.instance().discover(Launcher), *Plugins.instance().discover(Sweeper)]
    names = {plugin.__name__ for plugin in plugins if plugin.__module__ == "hydra_plugins.lm_runner"}
    assert names == {"JobLauncher", "GridSweeper", "HalvingSweeper", "OptunaSweeper"}
    groups = ConfigStore.instance().repo["hydra"]
    assert {f"{name}.yaml" for name in LAUNCHERS} <= groups["launcher"].keys() and {
        "grid.yaml",
        "optuna.yaml",
    } <= groups["sweeper"].keys()


@pytest.mark.slow
def test_sweep_runs_each_job_in_a_directory_that_was_written_before(
    sweep: Any, fake_jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLUGINS_ENV, "[]")
    fake_jobs.set(
        default=f"""
state = json.load(open("../sweep.json"))
assert [job["name"] for job in state["jobs"]] == ["optimizer.lr=0.001", "optimizer.lr=0.002"] and state["status"] == "running"
assert sorted(os.listdir(".hydra")) == ["conf", "config.yaml", "overrides.yaml"] and not overrides
assert os.environ[{PLUGINS_ENV!r}] == "[]"
assert "2 jobs: 2 new" in open("../report.html").read()
{GOOD}"""
    )
    assert sweep("optimizer.lr=1e-3,2e-3", "hydra.launcher.workers=2") == 0
    fields = read_sweep(tmp_path / "sweep")
    assert fields["status"] == "completed" and fields["swept"] == {"optimizer.lr": ["0.001", "0.002"]}
    assert [(job["status"], job["loss"], job["attempt"], job["outcome"]) for job in fields["jobs"]] == [
        ("completed", 1.5, 1, "completed")
    ] * 2
    assert (tmp_path / "sweep" / "report.html").is_file() and (tmp_path / "sweep" / "leaderboard.csv").is_file()


@pytest.mark.slow
def test_sweep_goes_on_without_a_page_and_warns_once(
    sweep: Any, fake_jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(folder: Path, is_final: bool = True) -> None:
        raise ValueError("no page")

    monkeypatch.setattr("runner.reporting.leaderboard.update_report", fail)
    fake_jobs.set(default=GOOD)
    assert sweep("optimizer.lr=1e-3,2e-3") == 0
    assert capfd.readouterr().err.count("warning: report.html cannot be written: ValueError: no page") == 1


@pytest.mark.slow
def test_sweep_without_a_directory_is_placed_in_outputs(
    fake_jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "workspace_dir", lambda: tmp_path)
    command.start_sweep(["seed=choice(1)"], {"--multirun": True}, run_sweep)
    assert len(list((tmp_path / "outputs" / "multirun").glob("*/*/sweep.json"))) == 1


def test_sweep_with_larger_steps_takes_fewer_of_them(finished: Path) -> None:
    overrides = yaml.safe_load((finished / "train.accumulation_steps=4" / ".hydra" / "overrides.yaml").read_text())
    assert {"train.max_steps=15", "train.eval_every=5", "train.accumulation_steps=4"} <= set(overrides)
    config = yaml.safe_load((finished / "train.accumulation_steps=4" / ".hydra" / "config.yaml").read_text())
    assert config["train"]["max_steps"] == 15 and config["train"]["accumulation_steps"] == 4


REFUSED = {
    "hydra/launcher=basic": "hydra/launcher must be one of local, submitit, ray, got basic",
    "hydra/launcher=joblib": "hydra/launcher must be one of local, submitit, ray, got joblib",
    "hydra/sweeper=basic": "hydra/sweeper must be one of grid, halving, optuna, got basic",
    "hydra.launcher.worker=2": "has no option worker",
    "hydra.launcher.workers=0": "must be at least 1, got 0",
    "hydra.launcher.workers=true": "hydra.launcher.workers must be an integer, got true",
    "hydra.launcher.retries=-1": "must be at least 0, got -1",
    "hydra.launcher.fail_fast=true,false": "takes one value",
    "hydra.launcher.devices=0,1": "takes one value",
    "hydra.launcher.devices=0": "must be a list of devices, got 0",
    "hydra.launcher.devices=[]": "must be a list of devices",
    "hydra.sweep.subdir=x": "hydra.sweep.subdir cannot be set",
    "optimizer.lr=1e-3,x": "optimizer.lr",
    "optimizer.lr=interval(1e-5,1e-3)": "needs lists of values",
    "data.path=nowhere.jsonl,missing.jsonl": "no such file",
    "data.path=${oc.env:HOME}": "the folder has no data files",
    "init_from=scratch,/nowhere": "",
    "seed=glob(*)": "no option of seed",
    "sweep.zip=[seed,optimizer.lr]": "sweep.zip names optimizer.lr",
    "sweep.match_budget=steps train.batch_size=1,2": "needs train.max_steps",
    "sweep.lr_scale=cubic": "must be one of none, linear, sqrt",
}


@pytest.mark.parametrize(("typed", "message"), REFUSED.items(), ids=REFUSED)
def test_sweep_refuses_a_wrong_setting_before_it_creates_a_directory(
    sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, message: str
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(UserError) as error:
        sweep("seed=1,2", *typed.split(" "))
    assert message in error.value.message and not (tmp_path / "sweep").exists() and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    "typed",
    [
        "hydra.launcher.workers=null",
        "hydra.launcher.devices=[0,GPU-1a,'2']",
        "hydra.launcher.fail_fast=true",
        "hydra.launcher.retries=0",
    ],
)
def test_sweep_accepts_the_options_of_the_local_launcher(typed: str) -> None:
    validation.check_hydra_overrides(["seed=1,2", typed])
    validation.hydra_options(compose_tree([typed]))


def test_sweep_refuses_a_second_sweep_in_its_directory(finished: Path, sweep: Any) -> None:
    before = files_of(finished)
    with pytest.raises(UserError, match="already holds a sweep"):
        sweep("seed=3,4")
    assert files_of(finished) == before


def test_sweep_stores_no_hydra_setting_that_could_run_code(capsys: pytest.CaptureFixture) -> None:
    typed = [
        "seed=1",
        "hydra/launcher=ray",
        "hydra.launcher.retries=1",
        "+hydra.job.env_set.A=b",
        "hydra.launcher.parameters={slurm_setup: [reboot]}",
        "hydra.searchpath=[file:///mine]",  # not named: a resume reads the sweep's copies of its files
    ]
    assert storable_overrides(typed) == typed[:3]
    assert capsys.readouterr().err.count("is not stored in sweep.json") == 2
    for override in (
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=9",
        "hydra.sweeper.params.seed=1",
        "hydra.launcher.gpus_per_node=2",
    ):
        assert is_safe_override(override), override
    for override in (
        "hydra.launcher.partition=x",
        "hydra.sweeper._target_=os.system",
        "seed=${oc.env:A}",
        "hydra.callbacks.x=1",
    ):
        assert not any(is_safe_override(sign + override) for sign in ("", "+", "++")), override


@pytest.mark.slow
def test_sweep_whose_console_is_closed_saves_at_ctrl_c_and_exits_with_75(fake_jobs: FakeJobs, tmp_path: Path) -> None:
    fake_jobs.set(
        default=SAVES.replace("def save(*_):", "def save(*_):\n    print('saving', flush=True); time.sleep(0.3)")
    )
    folder = tmp_path / "sweep"
    code = f"""
import runpy, sys
from runner.sweep import command
command.TRAIN_SCRIPT = {str(fake_jobs.script)!r}
sys.argv = ["runner/train.py", "-m", "seed=1,2", "hydra.sweep.dir={folder}"]
runpy.run_path("runner/train.py", run_name="__main__")
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until((folder / "seed=1" / "ready").exists)
    assert driver.stdout
    driver.stdout.close()
    driver.send_signal(signal.SIGINT)
    assert driver.wait(120) == 75
    assert [json.loads((folder / name).read_text())["status"] for name in ("seed=1/run.json", "sweep.json")] == [
        "interrupted"
    ] * 2


# Resuming


@pytest.mark.slow
def test_resume_runs_failed_and_new_jobs_only(sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path) -> None:
    fake_jobs.set_all({"seed=1": FLAKY, "seed=3": DIVERGED})
    assert sweep("seed=1,2,3,4", "hydra.launcher.fail_fast=true") == 1
    assert list(statuses(tmp_path / "sweep").values()) == ["failed", "new", "new", "new"]
    assert resume("hydra.launcher.fail_fast=false") == 1
    assert list(statuses(tmp_path / "sweep").values()) == ["completed", "completed", "failed", "completed"]
    assert resume() == 1
    assert [job["attempt"] for job in read_sweep(tmp_path / "sweep")["jobs"]] == [2, 1, 1, 1]


def test_resume_of_a_completed_sweep_changes_no_file(finished: Path, resume: Any) -> None:
    before = files_of(finished)
    assert resume() == 0 and files_of(finished) == before


@pytest.mark.slow
def test_resume_after_a_killed_driver_finds_what_its_jobs_have_done(
    fake_jobs: FakeJobs, resume: Any, tmp_path: Path
) -> None:
    fake_jobs.set_all({"seed=2": f"if fields['attempt'] > 1: {GOOD}; sys.exit(0)\n{SAVES}"})
    code = f"""
import runpy, sys
from runner.sweep import command
command.TRAIN_SCRIPT = {str(fake_jobs.script)!r}
sys.argv = ["runner/train.py", "-m", "seed=1,2,3", "hydra.sweep.dir={tmp_path / "sweep"}"]
runpy.run_path("runner/train.py", run_name="__main__")
"""
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    wait_until((tmp_path / "sweep" / "seed=2" / "ready").exists)
    driver.kill()
    driver.wait()
    assert list(statuses(tmp_path / "sweep").values()) == ["completed", "running", "new"]
    assert resume() == 0
    assert [read_run(tmp_path / "sweep" / f"seed={seed}")["attempt"] for seed in (1, 2, 3)] == [1, 2, 1]


@pytest.mark.slow
def test_sweep_whose_jobs_are_all_refused_is_refused_and_leaves_nothing(
    sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    fake_jobs.set(default=REFUSED_JOB.replace("print", "write('new', attempt=0); print", 1))
    with pytest.raises(UserError, match="all 2 jobs were refused: a row is wrong") as error:
        sweep("seed=1,2")
    assert (error.value.setting, error.value.fix) == ("rows.jsonl:3", "correct it") and not (
        tmp_path / "sweep"
    ).exists()


@pytest.mark.slow
def test_sweep_with_one_refused_job_keeps_the_others(sweep: Any, fake_jobs: FakeJobs, tmp_path: Path) -> None:
    fake_jobs.set_all({"seed=2": REFUSED_JOB.replace("print", "write('new', attempt=0); print", 1)})
    assert sweep("seed=1,2") == 1
    assert [job["status"] for job in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["jobs"]] == [
        "completed",
        "failed",
    ]


@pytest.mark.slow
def test_resume_adds_points_and_warns_of_unequal_budgets(
    finished: Path, resume: Any, capsys: pytest.CaptureFixture
) -> None:
    assert resume("train.accumulation_steps=2,04") == 0
    assert "do not see the same number" not in capsys.readouterr().err
    jobs = read_sweep(finished)["jobs"]
    assert [job["name"] for job in jobs[2:]] == ["train.accumulation_steps=2"] and {job["attempt"] for job in jobs} == {
        1
    }
    assert read_sweep(finished)["swept"] == {"train.accumulation_steps": ["1", "4", "2"]}
    assert "train.max_steps=30" in yaml.safe_load(
        (finished / jobs[2]["name"] / ".hydra" / "overrides.yaml").read_text()
    )
    assert resume("train.accumulation_steps=16") == 0
    assert "15 x 4096 = 61440, 4 x 16384 = 65536" in capsys.readouterr().err


REFUSED_ADDITIONS = {
    "seed=1,2": "seed is not swept here",
    "optimizer.lrr=1": "unknown setting optimizer.lrr",
    "train.accumulation_steps=2,x": "train.accumulation_steps",
    "sweep.match_budget=steps": "cannot change",
    "hydra/sweeper=halving": "the search of a sweep cannot change",
    "hydra/sweeper=optuna": "the search of a sweep cannot change",
    "hydra.sweep.dir=x": "cannot change",
    "train.max_steps=x": "train.max_steps",
    "stage=sft train.epochs=2": "stage of a sweep that has begun cannot change",
    "train.accumulation_steps=2 hydra.launcher.workers=0": "must be at least 1",
}


@pytest.mark.parametrize(("typed", "message"), REFUSED_ADDITIONS.items(), ids=REFUSED_ADDITIONS)
def test_resume_refuses_what_a_sweep_cannot_take_and_changes_nothing(
    finished: Path, resume: Any, typed: str, message: str
) -> None:
    before = files_of(finished)
    with pytest.raises(UserError) as error:
        resume(*typed.split())
    assert message in f"{error.value.message} {error.value.setting}" and files_of(finished) == before


@pytest.mark.parametrize(
    "override",
    ["hydra.callbacks.x._target_=os.system", "data.path=${oc.env:HOME}", "hydra.launcher.parameters={a: rm}"],
)
def test_resume_refuses_a_sweep_json_that_could_run_code(finished: Path, resume: Any, override: str) -> None:
    fields = read_sweep(finished)
    (finished / "sweep.json").write_text(json.dumps({**fields, "overrides": [*fields["overrides"], override]}))
    with pytest.raises(UserError, match="that it may not hold"):
        resume()


@pytest.mark.parametrize(
    "override, message",
    [
        ("plugins=[EVIL]", "plugins that were not given"),
        ("hydra.callbacks.x._target_=os.system", "that it may not hold"),
        ("--config-dir=/tmp", "that it may not hold"),
        ("resume=/tmp", "that it may not hold"),
    ],
)
def test_resume_refuses_overrides_of_a_job_that_could_run_code(
    finished: Path, resume: Any, tmp_path: Path, override: str, message: str
) -> None:
    """They are arguments of the job's command, as if they were typed."""
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('imported')\n")
    fields = read_sweep(finished)
    fields["jobs"][0] |= {
        "pending_overrides": [override.replace("EVIL", str(evil)), "train.max_steps=99"],
        "status": "interrupted",
    }
    (finished / "sweep.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message):
        resume()


@pytest.mark.parametrize(
    "stored",
    [{"overrides": {"--experimental-rerun": "x.pickle"}}, {"applied_overrides": ["--experimental-rerun=x.pickle"]}],
)
def test_sweep_json_with_a_flag_in_a_job_is_read_by_no_command(
    finished: Path, resume: Any, stored: dict[str, Any]
) -> None:
    fields = read_sweep(finished)
    fields["jobs"][0] |= stored | {
        "name": "--experimental-rerun=x.pickle" if "overrides" in stored else fields["jobs"][0]["name"]
    }
    (finished / "sweep.json").write_text(json.dumps(fields))
    for read in (
        resume,
        lambda: show_sweep_config(finished, [], ["--cfg=job"]),
        lambda: SweepState.open_readonly(finished),
    ):
        with pytest.raises(UserError, match="that it may not hold"):
            read()


@pytest.mark.slow
def test_resume_composes_from_the_copy_of_a_file_that_is_gone_from_conf(
    sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    fake_jobs.set(default=FLAKY)
    assert sweep("schedule=cosine,linear") == 1
    # as if conf/ had no such file any more
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("cosine", "gone"))
    (folder / ".hydra" / "conf" / "schedule").mkdir(exist_ok=True)
    shutil.copy(
        Path(__file__).parents[2] / "conf" / "schedule" / "cosine.yaml",
        folder / ".hydra" / "conf" / "schedule" / "gone.yaml",
    )
    shutil.rmtree(folder / "schedule=cosine")
    fake_jobs.set(default=GOOD)
    assert resume() == 0
    assert (
        yaml.safe_load((folder / "schedule=gone" / ".hydra" / "config.yaml").read_text())["schedule"]["name"]
        == "cosine"
    )


@pytest.mark.slow
def test_jobs_are_composed_as_checked_when_conf_changes_while_the_sweep_runs(
    sweep: Any, fake_jobs: FakeJobs, tmp_path: Path
) -> None:
    """A job may start days after the first."""
    conf = shutil.copytree(Path(__file__).parents[2] / "conf", tmp_path / "conf")
    (conf / "schedule" / "mine.yaml").write_text(
        (conf / "schedule" / "cosine.yaml").read_text().replace("min_lr_ratio: 0.1", "min_lr_ratio: 0.2")
    )
    change = f"open({str(conf / 'schedule' / 'mine.yaml')!r}, 'w').write('changed: 1')"
    fake_jobs.set(default=f"{change}\n{GOOD}")
    assert sweep("seed=1,2", "schedule=mine", f"hydra.searchpath=[file://{conf}]") == 0
    configs = [
        yaml.safe_load((tmp_path / "sweep" / f"seed={seed}" / ".hydra" / "config.yaml").read_text()) for seed in (1, 2)
    ]
    assert [config["schedule"]["min_lr_ratio"] for config in configs] == [0.2, 0.2]


@pytest.mark.slow
def test_jobs_start_from_the_same_weights_whatever_run_completes_meanwhile(
    sweep: Any, resume: Any, fake_jobs: FakeJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = initial_weights.compatibility_fingerprints(compose_config(["stage=sft"]))
    for module in (auto_choice, initial_weights):
        monkeypatch.setattr(module, "outputs_dir", lambda: tmp_path / "outputs")

    def complete_run(name: str) -> str:
        (tmp_path / "outputs" / "day" / name / "model").mkdir(parents=True)
        fields = {
            "status": "completed",
            "outcome": "completed",
            "attempt": 1,
            "step": 1,
            "tokens": 1,
            "stage": "pretrain",
            "fingerprints": fingerprints,
            "ended": name,
        }
        (tmp_path / "outputs" / "day" / name / "run.json").write_text(json.dumps(fields))
        return str(tmp_path / "outputs" / "day" / name)

    def initial_weights_of_jobs() -> list[str]:
        paths = sorted((tmp_path / "sweep").glob("seed=*/.hydra/config.yaml"))
        return [yaml.safe_load(path.read_text())["init_from"] for path in paths]

    first = complete_run("2026-11-21T10:00:00+00:00")
    assert sweep("stage=sft", "seed=1,2") == 0
    complete_run("2026-11-22T10:00:00+00:00")
    assert resume("seed=3") == 0
    assert initial_weights_of_jobs() == [first] * 3 and [*read_sweep(tmp_path / "sweep")["init_from"].values()] == [
        first
    ]


def test_continue_command_can_be_pasted_whatever_the_directory_is_called(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "it's a sweep"
    with SweepState.create(folder, swept={"seed": ["0"]}) as state, pytest.raises(SystemExit):
        state.add_job({"seed": "0"})
        SweepSession(state).finish(stopped=True)
    line = capsys.readouterr().err.partition("continue with: ")[2]
    assert shlex.split(line)[-1] == f"resume={folder}"


@pytest.mark.slow
def test_show_config_prints_the_job_that_resume_would_run_and_writes_nothing(
    finished: Path, capsys: pytest.CaptureFixture
) -> None:
    shutil.rmtree(finished / "train.accumulation_steps=4")
    before = files_of(finished)

    def printed(*typed: str) -> tuple[int, int]:
        show_sweep_config(finished, list(typed), {"--cfg": "job"})
        train = yaml.safe_load(capsys.readouterr().out)["train"]
        return train["accumulation_steps"], train["max_steps"]

    assert printed() == (4, 15)
    assert printed("train.max_steps=80", "train.accumulation_steps=1") == (1, 80)
    assert printed("train.accumulation_steps=2") == (2, 30)
    with pytest.raises(UserError):
        printed("model.hidden_sizes=2")
    assert files_of(finished) == before
