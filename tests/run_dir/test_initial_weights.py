"""init_from: a path, the newest completed run of the previous stage, or random weights with a warning."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import UserError
from data.tokenize.origin import SAMPLE_TOKENIZER
from models.formats.load import load_weights
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.config.compose import compose_config
from runner.config.resolve import resolve_model_overrides, resolve_model_run
from runner.engine.config import Config
from runner.launch.initial_weights import compatibility_fingerprints, resolve_init_from, restore_initial_weights
from runner.run_dir.best_job import find_best_job


@pytest.fixture(scope="module")
def sft() -> Config:
    return compose_config(["stage=sft"])


@pytest.fixture
def day(workspace: Path) -> Path:
    return workspace / "outputs" / "2026-11-21"


def write_run(
    folder: Path,
    fingerprints: dict[str, str],
    ended: str,
    stage: str = "pretrain",
    status: str = "completed",
    **more: object,
) -> str:
    (folder / "model").mkdir(parents=True)
    fields = {
        "status": status,
        "stage": stage,
        "fingerprints": fingerprints,
        "ended": f"2026-11-21T{ended}+00:00",
        "step": 0,
        "tokens": 0,
    } | more
    (folder / "run.json").write_text(json.dumps(fields))
    return str(folder)


def resolved(config: Config, day: Path) -> str:
    return resolve_init_from(config, day / "now")


def test_auto_takes_the_newest_completed_run_of_the_previous_stage(
    sft: Config, day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprints = compatibility_fingerprints(sft)
    write_run(day / "10-00-00", fingerprints, "10:05:00")
    newest = write_run(day / "10-01-00", fingerprints, "10:09:00")
    write_run(day / "10-02-00", fingerprints, "10:07:00")  # started later, completed earlier
    write_run(day / "10-03-00", fingerprints, "10:11:00", status="failed")
    write_run(day / "10-04-00", fingerprints, "10:12:00", stage="sft")
    write_run(day / "10-06-00", {**fingerprints, "model": "another"}, "10:14:00")
    (day / "10-07-00").mkdir()
    (day / "10-07-00" / "run.json").write_text("torn {")
    assert resolved(sft, day) == newest
    assert newest in capsys.readouterr().err


def test_auto_takes_a_run_of_any_tokenizer_unless_one_is_typed(sft: Config, day: Path) -> None:
    typed = dataclasses.replace(sft, data=dataclasses.replace(sft.data, tokenizer=str(SAMPLE_TOKENIZER)))
    same = write_run(day / "10-00-00", compatibility_fingerprints(typed), "10:05:00")
    another = write_run(day / "10-01-00", {**compatibility_fingerprints(sft), "tokenizer": "another"}, "10:09:00")
    assert (resolved(sft, day), resolved(typed, day)) == (another, same)


def test_auto_finds_jobs_of_a_sweep(sft: Config, day: Path) -> None:
    job = write_run(
        day.parent / "multirun" / "2026-11-21" / "10-00-00" / "optimizer.lr=0.1",
        compatibility_fingerprints(sft),
        "10:05:00",
    )
    assert resolved(sft, day) == job


def scored(loss: float, steps: int = 1000, **evaluation: object) -> dict[str, object]:
    """Fields of run.json of a run whose model has this evaluation loss."""
    identity = {"on": "validation", "data": "a", "rows": 10, "tokens": 0, "tokenizer": "t", "loss": {}} | evaluation
    fields = {
        "step": steps,
        "tokens": 100 * steps,
        "metrics": {"loss": loss},
        "data": [{"file": "/data/world.jsonl"}],
        "evaluation": identity,
    }
    return fields | {"export": {"weights": "best", "step": steps, "loss": loss}}


@pytest.fixture
def sweep(sft: Config, day: Path) -> Path:
    """A sweep of three jobs: the best one ended first."""
    folder = day.parent / "multirun" / "2026-11-21" / "10-00-00"
    jobs = {f"optimizer.lr={lr}": loss for lr, loss in (("0.1", 2.5), ("0.2", 2.0), ("0.3", 6.95))}
    for minute, (name, loss) in zip((7, 5, 9), jobs.items(), strict=True):
        write_run(folder / name, compatibility_fingerprints(sft), f"10:0{minute}:00", **scored(loss))
    entries = [{"name": name, "overrides": {"optimizer.lr": name[-3:]}} for name in jobs]
    (folder / "sweep.json").write_text(json.dumps({"overrides": [], "swept": {}, "jobs": entries}))
    return folder


def test_auto_after_a_sweep_takes_its_best_job(
    sft: Config, day: Path, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took the job that ended last, which was the worst."""
    write_run(day / "09-00-00", compatibility_fingerprints(sft), "09:00:00", **scored(2.2))
    assert resolved(sft, day) == str(sweep / "optimizer.lr=0.2")
    message = capsys.readouterr().err
    assert (
        "best job of the newest sweep" in message
        and "1,000 steps, validation loss 2.0000, data world.jsonl, ended" in message
        and "warning" not in message
    )


def test_folder_with_the_name_scratch_is_not_what_init_from_means(
    sft: Config, day: Path, sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sweep.rename(sweep.with_name("scratch")).parent)
    assert resolved(dataclasses.replace(sft, init_from="scratch"), day) == "scratch"
    assert resolve_model_overrides(["init_from=scratch"]) == ["init_from=scratch"]
    assert resolve_model_overrides(["init_from=./scratch"]) == ["init_from='scratch/optimizer.lr=0.2'"]


def test_sweep_as_init_from_means_its_best_job(
    sft: Config, day: Path, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolved(dataclasses.replace(sft, init_from=str(sweep)), day) == str(sweep / "optimizer.lr=0.2")
    assert "best job optimizer.lr=0.2, best weights, step 1000, evaluation loss 2.0000" in capsys.readouterr().err
    assert resolve_model_overrides([f"init_from={sweep}"]) == [f"init_from='{sweep}/optimizer.lr=0.2'"]
    assert resolve_model_overrides([f"init_from=scratch,{sweep}"])[0].startswith(
        "init_from=scratch,'"
    ) and resolve_model_overrides(["seed=1"]) == ["seed=1"]
    assert resolve_model_run(str(sweep)) == resolve_model_run("last") == sweep / "optimizer.lr=0.2"
    assert resolve_model_overrides(["init_from=last"]) == [
        f"init_from='{sweep}/optimizer.lr=0.2'"
    ] and resolve_model_overrides(["model.path=last"]) == ["model.path=last"]


def test_sweep_whose_jobs_were_judged_differently_has_no_best_job(sft: Config, day: Path, sweep: Path) -> None:
    fields = json.loads((sweep / "optimizer.lr=0.3" / "run.json").read_text())
    (sweep / "optimizer.lr=0.3" / "run.json").write_text(json.dumps(fields | scored(1.0, data="b")))
    with pytest.raises(UserError, match="different evaluation rows"):
        find_best_job(sweep)


def test_sweep_with_seeds_has_the_best_job_of_the_best_point(tmp_path: Path) -> None:
    """One lucky seed does not win against a better mean; a point with an unfinished seed does not take part, unless the
    sweep itself has added that seed.
    """
    losses = {("1", "1"): 1.0, ("1", "2"): 4.0, ("2", "1"): 2.0, ("2", "2"): 2.2, ("3", "1"): 0.1}
    jobs = [{"name": f"x={x},seed={seed}", "overrides": {"x": x, "seed": seed}} for x, seed in [*losses, ("3", "2")]]
    for job, loss in zip(jobs, losses.values(), strict=False):
        write_run(tmp_path / job["name"], {}, "10:00:00", **scored(loss))
    (tmp_path / "sweep.json").write_text(json.dumps({"swept": {"seed": ["1", "2"]}, "jobs": jobs}))
    assert find_best_job(tmp_path).name == "x=2,seed=1"
    (tmp_path / "sweep.json").write_text(json.dumps({"swept": {"seed": ["1"]}, "jobs": jobs}))
    assert find_best_job(tmp_path).name == "x=3,seed=1"


@pytest.mark.parametrize(
    "kind, other",
    [("better", scored(1.0)), ("longer", scored(9.0, steps=5000, data="b")), ("", scored(9.0, steps=5000))],
)
def test_auto_warns_of_a_better_or_longer_run(
    sft: Config, day: Path, capsys: pytest.CaptureFixture[str], kind: str, other: dict
) -> None:
    """It took a smoke test of 20 steps and printed only its path."""
    fingerprints = compatibility_fingerprints(sft)
    better = write_run(day / "10-00-00", fingerprints, "10:05:00", **other)
    smoke_test = write_run(day / "10-01-00", fingerprints, "10:09:00", **scored(7.1, steps=20))
    assert resolved(sft, day) == smoke_test
    message = capsys.readouterr().err
    assert "20 steps, validation loss 7.1000" in message and (
        f"warning: there is a {kind} run: init_from={better}" in message
    ) == bool(kind)


def test_auto_without_a_run_starts_from_random_weights_with_a_warning(
    sft: Config, day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolved(sft, day) == "scratch"
    assert "random weights" in capsys.readouterr().err


def test_first_stage_starts_from_random_weights_without_a_warning(
    day: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolved(compose_config([]), day) == "scratch"
    assert capsys.readouterr().err == ""


def test_scratch_ignores_completed_runs(sft: Config, day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(day / "10-00-00", compatibility_fingerprints(sft), "10:05:00")
    assert resolved(dataclasses.replace(sft, init_from="scratch"), day) == "scratch" and capsys.readouterr().err == ""


def test_run_that_is_not_completed_gives_its_newest_whole_checkpoint(
    sft: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`start a new run with init_from=RUN` is what a resume proposes, mostly of such a run."""
    from_run = dataclasses.replace(sft, init_from=str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(UserError, match="no model and no whole checkpoint") as error:
        resolved(from_run, tmp_path)
    assert error.value.fix.endswith(f"resume={tmp_path / 'run'}")
    for step in (1, 2, 3):
        write_atomic_dir(tmp_path / "run" / "checkpoints", f"step-{step:08}", {"model.safetensors": b"weights"}, {})
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors").write_bytes(b"damaged")
    for _ in range(2):  # the checks of a start, and the start
        assert resolved(from_run, tmp_path) == str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert capsys.readouterr().err.count("the run has no model/, the weights are those of step-00000002") == 1
    for read_again in ("dpo", "lora"):  # by a resume, when the run may have deleted the checkpoint
        with pytest.raises(UserError, match="reads the weights again") as error:
            resolved(
                compose_config([f"stage={read_again}", f"init_from={tmp_path / 'run'}", "data.path=none"]), tmp_path
            )
        assert error.value.fix.endswith(f"resume={tmp_path / 'run'}")
    (tmp_path / "completed" / "model").mkdir(parents=True)
    (tmp_path / "completed" / "run.json").write_text("{}")
    assert resolved(dataclasses.replace(sft, init_from=f"{tmp_path / 'completed'}"), tmp_path).endswith("completed")


def test_checkpoint_of_an_adapter_is_refused_with_its_export(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    save_file({"q_proj.lora.default.A": torch.zeros(2, 2)}, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match="an adapter without its base model") as error:
        load_weights(checkpoint)
    # not its run, which has other weights
    assert error.value.fix == f"python runner/export.py run={checkpoint} to=NEW format=merged, then init_from=NEW"


def test_lost_initial_weights_refuse_the_resume_of_a_run_that_reads_them(tmp_path: Path) -> None:
    lost = f"init_from={tmp_path / 'lost'}"
    for stage in ("dpo", "lora"):
        with pytest.raises(UserError, match="the initial weights of this run do not exist"):
            restore_initial_weights(compose_config([f"stage={stage}", lost, "data.path=none"]))
    for start in ("stage=sft", lost), ("stage=lora", "init_from=scratch"), ("stage=dpo", f"init_from={tmp_path}"):
        config = compose_config([*start, "data.path=none"])
        assert restore_initial_weights(config) is config


def test_missing_path_is_refused_with_the_nearest_name(sft: Config, day: Path, tmp_path: Path) -> None:
    (tmp_path / "pretrain_512.pth").touch()
    with pytest.raises(UserError) as error:
        resolved(dataclasses.replace(sft, init_from=str(tmp_path / "pretrain_521.pth")), day)
    assert str(tmp_path / "pretrain_512.pth") in error.value.fix


def test_fingerprint_depends_on_the_shape_of_the_weights_only(sft: Config) -> None:
    def fingerprint(**changes: object) -> str:
        return compatibility_fingerprints(dataclasses.replace(sft, model=dataclasses.replace(sft.model, **changes)))[
            "model"
        ]

    assert fingerprint() == fingerprint(dropout=0.1, attention="math", name="other") != fingerprint(num_hidden_layers=5)
