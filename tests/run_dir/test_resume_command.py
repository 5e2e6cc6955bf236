"""`resume=DIR` on the command line: changed conf/, Hydra's own ways to run a directory again, and what is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_fixtures import TINY_RUN, Call, Result, is_user_error

from common import paths
from common.errors import UserError
from runner.config.compose import split_runtime
from runner.launch.resume import plan_resume
from runner.run_dir.metadata import RunMetadata


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    from runner.cli.entrypoint import train_command

    root = tmp_path_factory.mktemp("trained")
    (root / "rows.jsonl").write_text(
        "".join(f'{{"text": "{number} goats sing in the rain"}}\n' for number in range(40))
    )
    run = root / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "REPO_ROOT", root)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        train_command(
            [*TINY_RUN, f"data.path={root / 'rows.jsonl'}", "schedule.min_lr_ratio=0.5", f"hydra.run.dir={run}"],
        )
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it in another place."""
    return Path(shutil.copytree(trained, tmp_path / "moved here" / "run"))


@pytest.fixture
def refused(call: Call, workspace: Path) -> Callable[..., Result]:
    """`refused(*argv)`: the end of a train.py that refuses, prints nothing else and creates no outputs/."""

    def refused(*argv: str) -> Result:
        result = call(*argv)
        assert is_user_error(result) and not (workspace / "outputs").exists(), result
        return result

    return refused


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.slow
def test_resume_composes_from_the_copy_of_conf_and_names_changed_files(call: Call, run: Path) -> None:
    own = run / ".hydra" / "conf"
    (own / "schedule" / "linear.yaml").write_text("name: linear\nwarmup_steps: 0\nmin_lr_ratio: 0.3\n")
    (own / "schedule" / "cosine.yaml").rename(own / "schedule" / "gone.yaml")
    printed = call("--cfg", "job", f"resume={run}", "schedule=linear")
    assert yaml.safe_load(printed.stdout)["schedule"]["min_lr_ratio"] == 0.3
    notes = printed.stderr.splitlines()
    assert [note.split()[1] for note in notes] == [
        "conf/schedule/gone.yaml",
        "conf/schedule/linear.yaml",
        "schedule.min_lr_ratio=0.5",
    ], notes
    assert "is not in conf/" in notes[0] and "has changed (min_lr_ratio)" in notes[1] and "is dropped" in notes[2]
    result = call(f"resume={run / 'model' / 'config.json'}", "train.max_steps=3", "schedule=gone")
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    assert (config["schedule"]["name"], config["schedule"]["min_lr_ratio"], config["train"]["max_steps"]) == (
        "cosine",
        0.1,
        3,
    )
    assert (
        json.loads((run / "run.json").read_text())["step"] == 3
        and (run / ".hydra" / "history" / "000" / "config.yaml").is_file()
    )


@pytest.mark.slow
def test_files_of_a_run_have_the_permissions_of_any_new_file(trained: Path) -> None:
    (trained.parent / "new").touch()
    assert {file.stat().st_mode for file in trained.rglob("*") if file.is_file()} == {
        (trained.parent / "new").stat().st_mode
    }


def test_resume_of_a_completed_run_changes_nothing(call: Call, run: Path) -> None:
    before = contents(run)
    for argv in ([f"resume={run}"], [f"resume='{run}'", "train.max_steps=2"]):
        result = call(*argv)
        assert result.returncode == 0 and "already complete at step 2" in result.stdout
    assert contents(run) == before


def test_resume_of_a_completed_run_writes_its_lost_model_again(call: Call, trained: Path, run: Path) -> None:
    shutil.rmtree(run / "model")
    refused = call(f"resume={run}", "seed=9")
    assert is_user_error(refused) and "leave them out: model/ is written again" in refused.stderr
    assert call(f"resume={run}").returncode == 0
    name = "model/model.safetensors"
    assert (run / name).read_bytes() == (trained / name).read_bytes()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--info",), id="--info", marks=pytest.mark.slow),
        pytest.param(("--cfg=job", "--package", "schedule"), id="--cfg"),
    ],
)
def test_printing_the_config_of_a_resume_writes_nothing(call: Call, run: Path, flags: tuple[str, ...]) -> None:
    before = contents(run)
    result = call(*flags, f"resume={run}", "schedule=linear")
    assert result.returncode == 0 and "linear" in result.stdout, result.stderr
    assert contents(run) == before


def test_completion_works_beside_resume(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for line, expected in (
        ("resume=/some/moved\\ here/run optimizer.l", "optimizer.lr="),
        ("resume=last schedule=", "schedule=linear"),
    ):
        monkeypatch.setenv("COMP_LINE", f"python runner/train.py {line}")
        assert expected in call("--shell-completion", "query=bash").stdout.split()


def test_resume_last_finds_the_newest_run_from_any_directory(
    call: Call, trained: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_user_error(call("resume=last"))
    run = Path(shutil.copytree(trained, workspace / "outputs" / "multirun" / "2026-01-01" / "00-00-00" / "seed=1"))
    monkeypatch.chdir("/")
    assert "already complete" in call("resume=last").stdout
    assert yaml.safe_load(call("--cfg", "job", "resume=last", "seed=9").stdout)["seed"] == 9
    assert contents(run) == {name.replace(str(trained), str(run)): digest for name, digest in contents(trained).items()}


class Trap:
    def __reduce__(self):
        return (open, ("hacked", "w"))


RERUNS = {
    "run.dir alone": ["hydra.run.dir={run}", "stage=dpo"],
    "config-path": ["--config-path", "{run}/.hydra", "--config-name", "config"],
    "short flags": ["-cp", "{run}/.hydra", "-cn", "config", "precision=bf16"],
    "config-dir": ["--config-dir={run}/.hydra/conf"],
    "rerun of hydra 1.3": ["--experimental-rerun", "{run}/.hydra/config.pickle"],
    "rerun of hydra 1.4": ["--experimental-rerun", "{run}"],
    "abbreviated flag": ["--experimental", "{run}"],
}


@pytest.mark.parametrize("argv", RERUNS.values(), ids=RERUNS)
def test_hydra_s_ways_to_rerun_are_refused_with_resume(
    refused: Callable[..., Result], run: Path, argv: list[str]
) -> None:
    (run / ".hydra" / "config.pickle").write_bytes(pickle.dumps(Trap()))
    before = contents(run.parents[1])
    assert f"resume={run}" in refused(*(arg.format(run=run) for arg in argv)).stderr
    assert contents(run.parents[1]) == before


@pytest.mark.parametrize("flags", [["--info", "config"], ["--cfg", "job"], ["train.max_steps=4"]], ids=" ".join)
@pytest.mark.parametrize(
    "stored",
    ["--experimental-rerun={trap}", "+experiment@hydra.callbacks=x", "hydra={{callbacks: {{}}}}", "${{oc.env:HOME}}=1"],
)
def test_resume_refuses_stored_overrides_that_are_no_settings(
    refused: Callable[..., Result], run: Path, workspace: Path, stored: str, flags: list[str]
) -> None:
    trap, file = workspace / "config.pickle", run / ".hydra" / "overrides.yaml"
    trap.write_bytes(pickle.dumps(Trap()))
    file.write_text(yaml.safe_dump([*yaml.safe_load(file.read_text()), stored.format(trap=trap)]))
    before = contents(run)
    result = refused(f"resume={run}", *flags)
    assert "overrides.yaml holds an override that it may not hold" in result.stderr
    assert contents(run) == before and not (workspace / "hacked").exists()


def test_suggested_command_starts_the_same_run_again(call: Call, run: Path) -> None:
    hint = call("-cp", str(run / ".hydra"), "-cn", "config").stderr
    argv = hint.partition("python runner/train.py ")[2].split()
    printed = yaml.safe_load(call(*argv, "--cfg", "job", "--resolve").stdout)
    resumed = yaml.safe_load(call(f"resume={run}", "--cfg", "job").stdout)
    printed["data"]["cache"] = resumed["data"]["cache"]  # that of the workspace of the first start
    assert printed == resumed


REFUSED = (
    ["-m", "resume={run}"],
    ["-m", "resume={run}", "optimizer.lr=1,2"],
    ["resume={run}", "--cfg", "all"],
    ["resume={run}", "hydra.run.dir=other"],
    ["resume={run}", "optimizer.lr=1,2"],
    ["resume={run}", "model=minimind_26m"],
    ["resume={run}", "data.path=nowhere.jsonl"],
    ["hydra.run.dir={run}/checkpoints/mine"],
)


@pytest.mark.parametrize("argv", REFUSED, ids=" ".join)
def test_resume_refuses_what_contradicts_the_run(refused: Callable[..., Result], run: Path, argv: list[str]) -> None:
    before = contents(run)
    refused(*(arg.format(run=run) for arg in argv))
    assert contents(run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "override", ["model.hidden_size=64", "seed=3", "data.val_fraction=0.5", "optimizer=adamw", "train.max_steps=1"]
)
def test_resume_refuses_what_contradicts_the_checkpoint(call: Call, run: Path, override: str) -> None:
    before = contents(run)
    result = call(f"resume={run}", override)
    assert result.returncode == 2 and override.partition("=")[0] in result.stderr, result.stderr
    assert {name: digest for name, digest in contents(run).items() if not name.endswith("train.log")} == {
        name: digest for name, digest in before.items() if not name.endswith("train.log")
    }


def test_run_without_the_field_outcome_is_refused_as_of_an_older_version(
    refused: Callable[..., Result], run: Path
) -> None:
    fields = json.loads((run / "run.json").read_text())
    del fields["outcome"]
    (run / "run.json").write_text(json.dumps(fields))
    shutil.rmtree(run / "checkpoints")
    assert "older version" in refused(f"resume={run}").stderr


def test_saved_config_with_a_renamed_setting_is_refused_with_its_new_name(run: Path) -> None:
    file = run / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("match_budget:", "fix:"))
    with pytest.raises(UserError, match="sweep.match_budget"):
        plan_resume(run, [])


def test_run_in_training_is_neither_resumed_nor_changed(call: Call, run: Path) -> None:
    with RunMetadata.open(run, resume=True):
        before = contents(run)
        result = call(f"resume={run}", "train.max_steps=9")
        assert result.returncode == 2 and "is being trained by process" in result.stderr
        assert contents(run) == before
        assert call(f"resume={run}", "--cfg", "job").returncode == 0, "printing takes no lock"


@pytest.mark.slow
def test_saved_settings_of_hydra_are_not_used(call: Call, run: Path) -> None:
    """A user's own callbacks are in the saved files too; nothing of the section `hydra` there is composed."""
    callback = {"callbacks": {"x": {"_target_": "subprocess.check_call", "args": ["touch", str(run / "hacked")]}}}
    for file in (run / ".hydra" / "hydra.yaml", run / ".hydra" / "conf" / "config.yaml"):
        tree = yaml.safe_load(file.read_text())
        tree["hydra"] |= callback
        file.write_text(yaml.safe_dump(tree))
    for argv in (["--info"], ["--cfg", "job"], ["train.max_steps=3"]):
        assert call(f"resume={run}", *argv, "schedule=linear").returncode == 0
    assert not (run / "hacked").exists()
    tree["hydra"] = {"run": {"dir": str(run / "hacked")}, "job": {"env_set": {"X": "1"}, "chdir": True}}
    file.write_text(yaml.safe_dump(tree))
    assert call(f"resume={run}", "--info", "schedule=linear").returncode == 0
    assert not (run / "hacked").exists()


@pytest.mark.slow
def test_resume_uses_a_saved_cache_only_if_it_is_a_token_cache_of_this_user(
    call: Call, run: Path, tmp_path: Path
) -> None:
    """Token stores are read from it, and stale ones deleted in it."""
    file = run / ".hydra" / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    own, mixed, shared, linked = (tmp_path / name for name in ("own", "mixed", "shared", "linked"))
    for folder in (own, mixed, shared, linked):
        (folder / "contents").mkdir(parents=True)
    (mixed / "thesis.tex").write_text("years of work")
    shared.chmod(0o777)
    (linked / ("0" * 64)).symlink_to(mixed)
    for folder in (own, mixed, shared, linked, tmp_path / "missing"):
        saved["data"]["cache"] = str(folder)
        file.write_text(yaml.safe_dump(saved))
        shown = call(f"resume={run}", "--cfg=job")
        assert (f"cache: {folder}\n" in shown.stdout) == (folder == own) and (
            "no token cache of this user" in shown.stderr
        ) == (folder != own)
        assert f"cache: {folder}\n" in call(f"resume={run}", f"data.cache={folder}", "--cfg=job").stdout


def test_callback_group_is_a_setting_of_hydras_runtime() -> None:
    assert split_runtime(["hydra/callbacks=mine", "seed=1"]) == (["seed=1"], ["hydra/callbacks=mine"])
