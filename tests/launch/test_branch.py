"""`init_from=RUN@step-N keep=optimizer`: a new run that continues the complete state of another one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_fixtures import TINY_RUN, Call, Program, is_user_error

from common import paths
from common.errors import UserError
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.config.resolve import resolve_model_run
from runner.launch import branch
from runner.reporting.compare import ComparedRun
from runner.reporting.read_sweep import read_sweep_results
from runner.reporting.run_facts import RunReport
from runner.reporting.run_list import scan_runs
from runner.run_dir.metadata import RunMetadata

TRUNK_SETTINGS = [
    "train.max_steps=6",
    "train.save_every=2",
    "train.eval_every=1",
    "train.log_every=1",
    "train.keep_checkpoints=9",
    "data.val_fraction=0.3",
    "schedule=wsd",
    "schedule.warmup_steps=1",
    "optimizer.lr=0.02",
]
TENSORS = ("model.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with the checkpoints 2, 4 and 6."""
    from runner.cli.entrypoint import train_command

    root = tmp_path_factory.mktemp("trained")
    (root / "rows.jsonl").write_text("".join(f'{{"text": "{number} goats sing"}}\n' for number in range(40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "REPO_ROOT", root)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        data = f"data.path={root / 'rows.jsonl'}"
        train_command([*TINY_RUN, *TRUNK_SETTINGS, data, f"hydra.run.dir={root / 'trunk'}"])
    return root / "trunk"


@pytest.fixture
def trunk(trained: Path, workspace: Path) -> Path:
    return Path(shutil.copytree(trained, workspace / "trunk"))


def records(run: Path) -> list[dict[str, Any]]:
    """Return the numbers of metrics.jsonl that do not depend on time."""
    names = ("kind", "step", "epoch", "loss", "lr", "grad_norm", "tokens", "loss_tokens")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line).get(name) for name in names} for line in lines]


def tensors(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in TENSORS if (folder / name).exists()]


def assert_equal_runs(run: Path, other: Path, steps: tuple[int, ...] = (4, 6)) -> None:
    for step in steps:
        name = f"checkpoints/step-{step:08d}"
        assert tensors(run / name) == tensors(other / name) != [], name
    assert tensors(run / "model") == tensors(other / "model") != []
    assert records(run) == records(other)


@pytest.mark.slow
def test_branch_with_unchanged_settings_equals_its_trunk(call: Call, trunk: Path, workspace: Path) -> None:
    before = {path: path.read_bytes() for path in trunk.rglob("*") if path.is_file()}
    run = workspace / "branch"
    result = call("init_from=trunk@step-2", "keep=optimizer", f"hydra.run.dir={run}")
    assert result.returncode == 0, result.stderr
    assert f"branched from {trunk} at step 2, with the settings saved there" in result.stderr
    assert "branched from  trunk at step 2" in result.stdout and "resumed        at step 2" in result.stdout
    assert_equal_runs(run, trunk, (2, 4, 6))
    fields, of_trunk = RunMetadata.read(run), RunMetadata.read(trunk)
    assert fields["branched_from"].keys() == {"run", "step", "checkpoint"} and fields["id"] != of_trunk["id"]
    assert (fields["branched_from"]["run"], fields["branched_from"]["step"]) == (str(trunk), 2)
    assert (fields["attempt"], len(fields["attempts"]), fields["exact"]) == (2, 1, True)
    assert not fields["recovered"] and "is changed since" not in result.stdout + result.stderr
    assert {path: path.read_bytes() for path in trunk.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_branch_has_the_typed_settings_from_its_step_on(call: Call, trunk: Path, workspace: Path) -> None:
    typed = ["optimizer.lr=0.001", "schedule.decay_fraction=0.75", "train.max_steps=8"]
    result = call("init_from=trunk@step-4", "keep=optimizer", *typed)
    assert result.returncode == 0, result.stderr
    (run,) = (path.parent for path in (workspace / "outputs").glob("*/*/run.json"))
    assert "changed from here on: optimizer.lr: 0.02 -> 0.001" in result.stdout
    assert records(run)[:7] == records(trunk)[:7]  # the last evaluation comes after the checkpoint
    rates = [record["lr"] for record in records(run) if record["kind"] == "train" and record["step"] > 4]
    assert len(rates) == 4 and max(rates) <= 0.001 and rates == sorted(rates, reverse=True)
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    assert (config["optimizer"]["lr"], config["keep"], config["train"]["save_every"]) == (0.001, "none", 2)


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before run.json", "before the first step"])
def test_branch_killed_before_its_first_checkpoint_resumes_without_its_trunk(
    moment: str, call: Call, trunk: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object, **__: object) -> None:
        raise Killed

    typed = ["init_from=trunk@step-2", "keep=optimizer", "optimizer.lr=0.001"]
    assert call(*typed, "hydra.run.dir=whole").returncode == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        if moment == "before run.json":
            patch.setattr(RunMetadata, "record_created", kill)
        else:
            patch.setattr(branch, "run", kill)
        call(*typed, "hydra.run.dir=killed")
    shutil.rmtree(trunk)
    result = call("resume=killed")
    assert result.returncode == 0, result.stderr
    assert_equal_runs(workspace / "killed", workspace / "whole")
    assert RunMetadata.read(workspace / "killed")["branched_from"]["step"] == 2


REFUSED = [
    ("init_from=trunk@step-3 keep=optimizer", "no checkpoint step-3; its checkpoints: step-2, step-4, step-6"),
    ("init_from=trunk@step-3", "no checkpoint step-3; its checkpoints: step-2, step-4, step-6"),
    ("init_from=trunk@step-2 keep=optimizer stage=sft", "fix:   leave it out; or start a new run with init_from=TRUNK"),
    ("init_from=trunk@step-2 keep=optimizer seed=7", "seed: 42 -> 7"),
    ("init_from=trunk@step-2 keep=optimizer model.hidden_size=64", "model.hidden_size: 32 -> 64"),
    ("init_from=trunk@step-4 keep=optimizer train.max_steps=3", "give at least 4; a run cannot go back"),
    ("init_from=trunk@step-2 keep=optimizer train.batch_size=4", "rows_per_step: 2 -> 4"),
    (
        "init_from=trunk@step-2 keep=optimizer optimizer.lr=1e-4,1e-5",
        "--multirun init_from=TRUNK@last keep=optimizer optimizer.lr=1e-4,1e-5",
    ),
    ("init_from=trunk keep=optimizer", "init_from=TRUNK@last keep=optimizer"),
    ("init_from=scratch keep=optimizer", "init_from=RUN@step-N keep=optimizer"),
    ("init_from=gone@step-2 keep=optimizer", "there is no gone@step-2"),
    ("init_from=trunk@step-2 keep=optimizer seed=7 --cfg job", "seed: 42 -> 7"),
    ("keep=optimizer", "init_from=RUN@step-N keep=optimizer"),
    ("init_from=trunk@step-2 keep=weights", "keep must be one of none, optimizer, got weights"),
    ("init_from=trunk@step-2 keep=none,optimizer --multirun", "keep takes one value"),
    ("init_from=trunk@step-2,trunk@step-4 keep=optimizer seed=7 --multirun", "seed: 42 -> 7"),
    ("init_from=trunk@step-2 keep=optimizer stage=sft,pretrain --multirun", "stage cannot change in a run"),
    ("init_from=trunk@step-2 keep=optimizer train.batch_size=1", "rows_per_step: 2 -> 1"),
    ("init_from=trunk@step-2 keep=optimizer optimizer.lr=1e-4,1e-5 sweep.seeds=3 --multirun", "the seed of its trunk"),
    (
        "init_from=trunk@step-2 keep=optimizer optimizer.lr=1e-4,1e-5 sweep.budget=1m --multirun",
        "the seed of its trunk",
    ),
]


def test_checkpoint_is_named_alike_for_all_commands(trunk: Path) -> None:
    for name, folder in (("step-2", "step-00000002"), ("last", "step-00000006")):
        assert resolve_model_run(f"trunk@{name}") == trunk / "checkpoints" / folder
    with pytest.raises(UserError, match="no checkpoint step-3") as refused:
        resolve_model_run("trunk@step-3", "reference")
    assert refused.value.setting == "reference=trunk@step-3" and refused.value.fix == "reference=trunk@step-6"


@pytest.mark.parametrize(("typed", "message"), REFUSED, ids=[typed for typed, _ in REFUSED])
def test_branch_refused_leaves_nothing(typed: str, message: str, call: Call, trunk: Path, workspace: Path) -> None:
    result = call(*typed.split())
    assert result.returncode == 2, result
    assert message.replace("TRUNK", str(trunk)) in result.stderr
    assert "outputs" not in result.stderr.rpartition("error:")[2]
    assert not (workspace / "outputs").exists()


@pytest.mark.slow
def test_branch_of_a_run_with_commas_in_its_name(call: Call, trunk: Path, workspace: Path) -> None:
    job = trunk.rename(workspace / "lr=0.02,seed=42")  # as a sweep names its jobs
    for name in (f"{job.name}@step-4", f"'{job}@step-4'"):
        folder = f"run{len(name)}"
        assert call(f"init_from={name}", "keep=optimizer", f"hydra.run.dir={folder}").returncode == 0
        assert RunMetadata.read(workspace / folder)["branched_from"]["run"] == str(job)


def test_branch_of_a_damaged_or_linked_trunk_is_refused(call: Call, trunk: Path, workspace: Path) -> None:
    file = trunk / "checkpoints" / "step-00000002" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    result = call("init_from=trunk@step-2", "keep=optimizer")
    assert is_user_error(result) and "optimizer.safetensors: wrong checksum" in result.stderr
    (trunk / "tokenizer" / "tokenizer.json").unlink()
    (trunk / "tokenizer" / "tokenizer.json").symlink_to(workspace / "rows.jsonl")
    result = call("init_from=trunk@step-4", "keep=optimizer")
    assert is_user_error(result) and "this is a link" in result.stderr
    assert not (workspace / "outputs").exists()


@pytest.mark.slow
def test_settings_of_a_branch_are_shown(call: Call, trunk: Path, workspace: Path) -> None:
    shown = call("init_from=trunk@step-2", "keep=optimizer", "optimizer.lr=0.5", "--cfg", "job")
    assert shown.returncode == 0, shown.stderr
    config, saved = (yaml.safe_load(text) for text in (shown.stdout, (trunk / ".hydra" / "config.yaml").read_text()))
    assert config["optimizer"].pop("lr") == 0.5 and saved["optimizer"].pop("lr") == 0.02
    assert config == saved
    assert not (workspace / "outputs").exists()


def test_branch_keeps_a_value_that_its_trunk_typed_first(trunk: Path) -> None:
    typed = [f"init_from={trunk}/checkpoints/step-00000002", "keep=optimizer", "train.eval_every=0"]
    saved = (trunk / ".hydra" / "overrides.yaml").read_text()
    assert "train.eval_every=0" in saved and "train.eval_every=1" in saved
    for of_job in (typed, branch.with_trunk_settings(typed)):
        with branch.staged_settings(of_job) as (_, _, added):
            assert added == ["train.eval_every=0"]


def test_branch_keeps_a_value_equal_to_the_trunks_in_another_option(trunk: Path) -> None:
    values = ["schedule=cosine", "schedule.warmup_steps=1"]
    typed = [f"init_from={trunk}/checkpoints/step-00000002", "keep=optimizer", *values]
    for of_job in (typed, branch.with_trunk_settings(typed)):
        with branch.staged_settings(of_job) as (_, _, added):
            assert added == values


@pytest.mark.slow
def test_plan_of_a_branch_has_its_steps_left(call_command: Call, trunk: Path) -> None:
    typed = ("plan.py", "init_from=trunk@step-2", "keep=optimizer", "train.max_steps=9", "timing=false", "json=true")
    for more, jobs in ((), 1), (("--multirun", "optimizer.lr=0.1,0.2"), 2):
        result = call_command(*typed, *more)
        assert result.returncode == 0, result.stderr
        runs = json.loads(result.stdout)["runs"]
        assert [(run["data"]["steps"], run["resumed_at"]) for run in runs] == [(9, 2)] * jobs
    for more in ((), ("--multirun",)):
        result = call_command(*typed, "seed=7", *more)
        assert result.returncode == 2 and "seed: 42 -> 7" in result.stderr


FOREIGN = {
    "progress": {"progress": 3},
    "best step": {"progress": {"step": 2, "tokens": 1, "loss_tokens": 1, "best_step": "x", "best_loss": 1.0}},
    "log": {"log": {"metrics": "x"}},
    "fields": {"run": {"fields": {"attempts": 3}}},
    "resolver": {"run": {"fields": {}, "files": {".hydra/overrides.yaml": "- optimizer.lr=${oc.env:HOME}\n"}}},
    "YAML": {"run": {"fields": {}, "files": {".hydra/overrides.yaml": "[}"}}},
    "code": {"run": {"fields": {}, "files": {".hydra/config.yaml": "stage: {_target_: os.system}\n"}}},
}


@pytest.mark.parametrize("flags", [(), ("--multirun", "optimizer.lr=1e-4,1e-5")], ids=["run", "sweep"])
@pytest.mark.parametrize("changed", FOREIGN.values(), ids=FOREIGN)
def test_branch_of_a_foreign_state_is_refused(
    changed: dict[str, Any], flags: tuple[str, ...], call: Call, trunk: Path, workspace: Path
) -> None:
    checkpoint = trunk / "checkpoints" / "step-00000002"
    files: dict[str, Any] = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    del files["MANIFEST.json"]
    files["state.json"] = json.dumps(json.loads(files["state.json"]) | changed).encode()
    shutil.rmtree(checkpoint)
    write_atomic_dir(checkpoint.parent, checkpoint.name, files, {})
    result = call("init_from=trunk@step-2", "keep=optimizer", *flags)
    assert result.returncode == 2 and "error: " in result.stderr, result
    assert not (workspace / "outputs").exists()


@pytest.mark.slow
def test_branch_without_the_best_weights_of_its_trunk_chooses_its_own(call: Call, trunk: Path, workspace: Path) -> None:
    state = json.loads((trunk / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["progress"]["best_step"] == 3
    shutil.rmtree(trunk / "checkpoints" / "best-00000003")
    result = call("init_from=trunk@step-4", "keep=optimizer", "optimizer.lr=1e-9", "hydra.run.dir=run")
    assert result.returncode == 0, result.stderr
    assert "step 3, were deleted: the best of the branch is chosen from here on" in result.stderr
    assert RunMetadata.read(workspace / "run")["metrics"]["best_step"] > 3


@pytest.mark.slow
def test_checkpoint_named_by_its_step_gives_weights_alone_without_keep(
    call: Call, trunk: Path, workspace: Path
) -> None:
    data = f"data.path={trunk.parent / 'rows.jsonl'}"
    shutil.copy(yaml.safe_load((trunk / ".hydra" / "config.yaml").read_text())["data"]["path"], "rows.jsonl")
    names = {"last": "step-00000006", "step-4": "step-00000004", "step-00000002": "step-00000002"}
    for name, folder in names.items():
        result = call(*TINY_RUN, data, f"init_from=trunk@{name}", "train.max_steps=1", f"hydra.run.dir=run-{name}")
        assert result.returncode == 0, result.stderr
        fields = RunMetadata.read(workspace / f"run-{name}")
        assert fields["init_from"] == str(trunk / "checkpoints" / folder) and fields["branched_from"] is None
        assert (fields["step"], fields["attempt"]) == (1, 1)


@pytest.mark.slow
def test_branch_of_every_job_of_a_sweep(warm_program: Program, trunk: Path, workspace: Path) -> None:
    sweep = workspace / "sweep"
    typed = ["--multirun", f"init_from={trunk}@step-2,{trunk}@step-4", "optimizer.lr=0.02,0.001"]
    typed += ["sweep.zip=[init_from,optimizer.lr]", "keep=optimizer", f"hydra.sweep.dir={sweep}"]
    result = warm_program(*typed, OMP_NUM_THREADS=str(torch.get_num_threads()))
    assert result.returncode == 0, result.stderr
    jobs = {job.parent: RunMetadata.read(job.parent) for job in sweep.glob("*/run.json")}
    assert sorted(fields["branched_from"]["step"] for fields in jobs.values()) == [2, 4]
    for job in jobs:
        config = yaml.safe_load((job / ".hydra" / "config.yaml").read_text())
        assert (config["keep"], config["train"]["save_every"]) == ("none", 2)
        if config["optimizer"]["lr"] == 0.02:
            assert_equal_runs(job, trunk)
    for job_result in read_sweep_results(sweep).jobs:
        step = jobs[sweep / job_result.name]["branched_from"]["step"]
        assert job_result.launches[-1][-2:] == [f"init_from={trunk}@step-{step}", "keep=optimizer"]


@pytest.mark.slow
def test_halving_of_branches_stops_them_at_shares_of_their_own_steps(
    call: Call, call_command: Call, warm_program: Program, trunk: Path, workspace: Path
) -> None:
    """Steps of the trunk count for no rung: all branches that began after the first one were trained to their end."""
    typed = [*("--multirun", "hydra.sweeper.first_rung=0.5"), *("keep=optimizer", "train.max_steps=8")]
    halving = [*typed, "hydra/sweeper=halving", "optimizer.lr=0.02,0.01,0.001", "init_from=trunk@step-4"]
    result = warm_program(*halving, "hydra.sweep.dir=sweep")
    assert result.returncode == 0, result.stderr
    found = {job.status: workspace / "sweep" / job.name for job in read_sweep_results(workspace / "sweep").jobs}
    assert set(found) == {"completed", "paused"}
    assert RunMetadata.read(found["paused"])["step"] == 6
    refused = call(f"resume={workspace / 'sweep'}", "sweep.budget=10m")
    assert refused.returncode == 2 and "a branch has the seed of its trunk" in refused.stderr
    result = call_command("plan.py", f"resume={workspace / 'sweep'}", "optimizer.lr=0.03", "timing=false", "json=true")
    assert result.returncode == 0, result.stderr
    assert [run["resumed_at"] for run in json.loads(result.stdout)["runs"]] == [4]
    branch_of_paused = [f"init_from={found['paused']}@last", "keep=optimizer", "hydra.run.dir=branch"]
    assert call(*branch_of_paused).returncode == 0
    assert RunMetadata.read(workspace / "branch")["status"] == "completed"  # the rung is no setting of the run
    assert call(f"resume={found['paused']}", "train.stop_at=0").returncode == 0
    result = call_command("plan.py", *halving, "train.max_steps=4")
    assert result.returncode == 2 and "branches of step 4 have no step left" in result.stderr
    result = call_command("plan.py", *halving, "init_from=trunk@step-4,trunk@step-2")
    assert result.returncode == 2 and "branches begin at 2 and 4" in result.stderr


@pytest.mark.parametrize("flags", [(), pytest.param(("--multirun",), marks=pytest.mark.slow)], ids=["run", "sweep"])
def test_branch_has_no_name_and_no_seconds_of_its_trunk(
    flags: tuple[str, ...], call: Call, warm_program: Program, trunk: Path, workspace: Path
) -> None:
    assert call(f"resume={trunk}", "run.name=trunk", "run.note=ours", "train.max_steps=8").returncode == 0
    log = trunk / "metrics.jsonl"
    log.write_bytes(re.sub(rb'"time": \d', b'"time": 7', log.read_bytes()))
    start = [f"init_from={trunk}@step-8", "keep=optimizer", "train.max_steps=9"]
    where = f"hydra.sweep.dir={workspace / 'run'}" if flags else f"hydra.run.dir={workspace / 'run'}"
    result = warm_program(*flags, *start, where) if flags else call(*start, where)
    assert result.returncode == 0, result.stderr
    run = ComparedRun.read(next((workspace / "run").rglob("run.json")).parent)
    assert (run.name, run.note) == ("", "ours")
    assert run.metrics.last is not None and run.metrics.last.time < 7 and run.metrics.train.columns["seconds"][0] == 0
    assert len(run.metrics.train) == 9
    if flags:  # train.max_steps is one of the sweep, not of a person who has resumed the job
        assert [each.note for each in read_sweep_results(workspace / "run").jobs] == [""]


@pytest.mark.slow
def test_reports_name_the_trunk_of_a_branch(call: Call, trunk: Path, workspace: Path) -> None:
    assert call("init_from=trunk@step-4", "keep=optimizer", "hydra.run.dir=run").returncode == 0
    run = workspace / "run"
    assert RunReport.read(run).labels == ["pretrain", f"branched from {trunk} at step 4"]
    assert ComparedRun.read(run).values["branched from"] == f"{trunk} at step 4"
    rows = {row.folder.name: row for row in scan_runs(workspace).rows}
    assert rows["run"].start is rows["trunk"] and rows["run"].branch_step == 4
    assert f"branched from {trunk} at step 4" in (run / "report.html").read_text()
