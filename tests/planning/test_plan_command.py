"""plan.py as a command: steps that are really run, and nothing left of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from command_fixtures import TINY_RUN, Call, Program, is_user_error

from runner.config.compose import compose_config
from runner.planning.starts import planned_start

pytestmark = pytest.mark.slow


def plan_of(program: Program, *overrides: str) -> dict:
    done = program(*overrides, "json=true", command="plan.py")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["runs"][0]


def test_plan_times_real_steps_measures_their_memory_and_leaves_nothing(
    program: Program, checkout: Path, outputs: Path
):
    before = {path for path in checkout.rglob("*") if ".cache" not in path.parts and "__pycache__" not in path.parts}
    plan = plan_of(program, "device=cpu", "init_from=scratch", "train.max_steps=4")
    assert plan["time"]["timed_steps"] >= 1
    assert all(
        plan["time"][name] > 0
        for name in (
            "first_step_seconds",
            "step_seconds",
            "eval_seconds",
            "sample_seconds",
            "save_seconds",
            "total_seconds",
        )
    )
    assert plan["memory"]["total"] == pytest.approx(plan["time"]["peak_bytes"], rel=0.15)
    assert plan["disk"]["checkpoint"] == pytest.approx(plan["time"]["checkpoint_bytes"], rel=0.05)
    assert {
        path for path in checkout.rglob("*") if ".cache" not in path.parts and "__pycache__" not in path.parts
    } == before
    assert not list(checkout.glob(".cache/plan-*"))


def test_plan_of_a_resumed_run_counts_the_steps_that_are_left(warm_program: Program, tmp_path: Path):
    run = tmp_path / "run"
    assert warm_program(*TINY_RUN, "init_from=scratch", f"hydra.run.dir={run}").returncode == 0
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    plan = plan_of(warm_program, f"resume={run}", "train.max_steps=6", "timing=false")
    assert (plan["resumed_at"], plan["data"]["steps"], plan["time"]) == (2, 6, None)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == files
    fields = json.loads((run / "run.json").read_text())
    fields["attempts"][-1]["precision"] = "bf16"  # as a GPU would have computed it: its config says auto
    (run / "run.json").write_text(json.dumps(fields))
    assert planned_start([f"resume={run}", "train.max_steps=6"], {}).runs[0].config.precision.name == "bf16"


def test_plan_refuses_settings_with_the_exit_code_of_train(call_command: Call):
    refused = call_command("plan.py", "train.batch_size=0")
    assert refused.returncode == 2 and "train.batch_size must be at least 1" in refused.stderr


def test_batch_size_auto_trains_the_rows_of_a_step_in_micro_batches_that_fit(warm_program: Program, tmp_path: Path):
    sizes = ["train.batch_size=auto", "train.accumulation_steps=6"]
    overrides = [override for override in TINY_RUN if not override.startswith("train.batch_size")]
    done = warm_program(*overrides, *sizes, "init_from=scratch", f"hydra.run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    rows = 6 * compose_config(overrides).train.batch_size
    chosen = [f"train.batch_size={rows}", "train.accumulation_steps=1"]
    assert f"train.batch_size=auto: {' '.join(chosen)}, {rows} rows per step" in done.stderr
    recorded = yaml.safe_load((tmp_path / "run" / ".hydra" / "overrides.yaml").read_text())
    assert recorded[-2:] == chosen and "train.batch_size=auto" not in recorded
    assert plan_of(warm_program, *overrides, *sizes, "timing=false")["overrides"][-2:] == chosen


def test_batch_size_auto_is_refused_where_no_size_can_be_meant(call: Call):
    for arguments, problem in (
        (["--multirun", "seed=1,2"], "jobs of a sweep differ in what fits"),
        (["data.path=missing.jsonl"], "no such file or folder"),
    ):
        done = call("train.batch_size=auto", *arguments)
        assert is_user_error(done) and problem in done.stderr
