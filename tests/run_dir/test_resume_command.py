"""Relaunching as a person does it: the traps of Hydra's own ways, conf/ that has changed, and looking before leaping."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from runner.cli import entrypoint
from runner.run_dir import naming
from runner.run_dir.metadata import RunMetadata

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16", "model.intermediate_size=32",
    "train.max_steps=2", "train.batch_size=2", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "data.max_length=32", "data.val_path=null", "device=cpu",
]  # fmt: skip
Program = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def trained(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, started from conf/ as it is."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = [*SMALL, "schedule.min_lr_ratio=0.5", f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, str(checkout / "runner" / "train.py"), *words], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it: wherever a run is moved to, it is the same run."""
    return Path(shutil.copytree(trained, tmp_path / "moved here" / "run"))


@pytest.fixture
def conf(checkout: Path, tmp_path: Path) -> Iterator[Path]:
    """conf/ of the checkout, as it was afterwards."""
    here = checkout / "conf"
    shutil.copytree(here, tmp_path / "conf before")
    yield here
    shutil.rmtree(here)
    shutil.copytree(tmp_path / "conf before", here)


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """`refused(*words)`: what train.py says before it leaves with code 2, having let nothing in."""

    def refused(*words: str) -> str:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        monkeypatch.setattr(naming, "REPO_ROOT", tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as left:
            entrypoint.main(lambda: pytest.fail("it was let in"))
        said, error = capsys.readouterr()
        assert (left.value.code, said) == (2, "") and error.startswith("error: ") and not (tmp_path / "outputs").exists(), error
        return error

    return refused


def contents(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_whatever_becomes_of_conf_a_run_goes_on_as_it_began(program: Program, run: Path, conf: Path) -> None:
    before = program("--cfg", "job", f"resume={run}")
    assert before.returncode == 0 and before.stderr == ""
    muon = conf / "optimizer" / "muon.yaml"
    muon.write_text(muon.read_text().replace("momentum: 0.95", "momentum: 0.1"))
    (conf / "schedule" / "cosine.yaml").unlink()
    (conf / "stage" / "pretrain.yaml").rename(conf / "stage" / "pretraining.yaml")
    after = program("--cfg", "job", f"resume={run}")
    assert after.stdout == before.stdout
    told = [line.partition(":")[2].split()[0] for line in after.stderr.splitlines()]
    assert told == ["conf/optimizer/muon.yaml", "conf/schedule/cosine.yaml", "conf/stage/pretrain.yaml"]
    again = program("--cfg", "job", f"resume={run}", "schedule=cosine")
    assert "schedule.min_lr_ratio=0.5 was said for the former schedule: dropped" in again.stderr
    assert yaml.safe_load(again.stdout)["schedule"]["min_lr_ratio"] == 0.1
    done = program(f"resume={run / 'model' / 'config.json'}", "train.max_steps=3", "schedule=linear")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((run / ".hydra" / "config.yaml").read_text())
    assert config["optimizer"]["momentum"] == 0.95 and (config["schedule"]["name"], config["train"]["max_steps"]) == ("linear", 3)
    assert json.loads((run / "run.json").read_text())["step"] == 3 and (run / ".hydra" / "history" / "000" / "config.yaml").is_file()


def test_a_finished_run_says_so_and_is_not_touched(program: Program, run: Path) -> None:
    before = contents(run)
    for words in ([f"resume={run}"], [f"resume='{run}'", "train.max_steps=2"]):
        done = program(*words)
        assert done.returncode == 0 and "already complete at step 2" in done.stdout
    assert contents(run) == before


LOOKS = [("--info",), ("-i", "defaults-tree"), ("--cfg=job", "--package", "schedule")]


@pytest.mark.parametrize("flags", LOOKS, ids=" ".join)
def test_looking_at_a_run_as_it_would_go_on_writes_nothing(program: Program, run: Path, flags: tuple[str, ...]) -> None:
    before = contents(run)
    done = program(*flags, f"resume={run}", "schedule=linear")
    assert done.returncode == 0 and "linear" in done.stdout, done.stderr
    assert contents(run) == before


def test_tab_completes_beside_resume_and_writes_nothing(program: Program, run: Path) -> None:
    before = contents(run)
    escaped = str(run).replace(" ", "\\ ")
    for line, expected in ((f"resume={escaped} optimizer.l", "optimizer.lr="), ("resume=last schedule=", "schedule=linear")):
        done = program("--shell-completion", "query=bash", COMP_LINE=f"python runner/train.py {line}")
        assert expected in done.stdout.split()
    assert contents(run) == before


def test_resume_last_works_from_any_folder_with_every_flag(program: Program, trained: Path, outputs: Path) -> None:
    assert program("resume=last").returncode == 2
    run = Path(shutil.copytree(trained, outputs / "multirun" / "2026-01-01" / "00-00-00" / "seed=1"))
    assert "already complete" in program("resume=last", cwd=Path("/")).stdout
    assert yaml.safe_load(program("--cfg", "job", "resume=last", "seed=9").stdout)["seed"] == 9
    assert contents(run) == {name.replace(str(trained), str(run)): digest for name, digest in contents(trained).items()}


class Trap:
    def __reduce__(self):
        return (open, ("hacked", "w"))


OTHER_WAYS = {
    "the folder alone": ["hydra.run.dir={run}", "stage=dpo"],
    "stock Hydra's reproduction": ["--config-path", "{run}/.hydra", "--config-name", "config"],
    "with short flags": ["-cp", "{run}/.hydra", "-cn", "config", "precision=bf16"],
    "its copy of conf": ["--config-dir={run}/.hydra/conf"],
    "hydra 1.3's rerun": ["--experimental-rerun", "{run}/.hydra/config.pickle"],
    "hydra 1.4's rerun": ["--experimental-rerun", "{run}"],
    "a flag cut short": ["--experimental", "{run}"],
}


@pytest.mark.parametrize("words", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_other_ways_to_run_a_folder_again_are_refused_with_the_line_to_type(refused: Callable[..., str], run: Path, words: list[str]) -> None:
    (run / ".hydra" / "config.pickle").write_bytes(pickle.dumps(Trap()))
    before = contents(run.parents[1])
    said = refused(*(word.format(run=run) for word in words))
    assert [line.split(":")[0].strip() for line in said.splitlines()] == ["error", "where", "fix"]
    assert f"resume={run}" in said and contents(run.parents[1]) == before


def test_the_line_to_type_starts_the_same_run_anew(program: Program, run: Path) -> None:
    done = program("-cp", str(run / ".hydra"), "-cn", "config")
    line = done.stderr.partition("anew: python runner/train.py ")[2].split()
    assert program(*line, "--cfg", "job", "--resolve").stdout == program(f"resume={run}", "--cfg", "job").stdout


REFUSED = (
    ["-m", "resume={run}"],
    ["-m", "resume={run}", "optimizer.lr=1,2"],
    ["resume={run}", "--cfg", "all"],
    ["resume={run}", "hydra.run.dir=elsewhere"],
    ["resume={run}", "optimizer.lr=1,2"],
    ["resume={run}", "model=minimind_26m"],
    ["resume={run}", "data.path=nowhere.jsonl"],
    ["--multi", "resume={run}"],
    ["resume={run}", "-call"],
    ["hydra.run.dir={run}/checkpoints/mine"],
    ["hydra.output_subdir=null"],
    ["hydra.mode=MULTIRUN", "seed=1,2"],
    ["--config-name", "chat"],
    ["--config-dir", "conf"],
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_contradicts_a_run_is_refused_and_changes_nothing(refused: Callable[..., str], run: Path, words: list[str]) -> None:
    before = contents(run)
    refused(*(word.format(run=run) for word in words))
    assert contents(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("word", ["model.hidden_size=64", "seed=3", "data.val_fraction=0.5", "stage.beta=0.2", "optimizer=adamw", "train.max_steps=1"])
def test_words_that_contradict_the_saved_state_are_refused_and_leave_the_folder_as_it_was(program: Program, run: Path, word: str) -> None:
    before = contents(run)
    done = program(f"resume={run}", word)
    assert done.returncode == 2 and word.partition("=")[0] in done.stderr, done.stderr
    assert {name: digest for name, digest in contents(run).items() if not name.endswith("train.log")} == {
        name: digest for name, digest in before.items() if not name.endswith("train.log")
    }


def test_a_run_that_is_being_trained_is_left_alone(program: Program, run: Path) -> None:
    with RunMetadata.open(run, resume=True):
        before = contents(run)
        done = program(f"resume={run}", "train.max_steps=9")
        assert done.returncode == 2 and "is being trained by process" in done.stderr
        assert contents(run) == before
        assert program(f"resume={run}", "--cfg", "job").returncode == 0, "looking takes no lock"


def test_nothing_that_is_stored_for_hydra_is_run_or_looked_up(program: Program, run: Path) -> None:
    """Callbacks of a stored config would run before anything of ours could look at them."""
    callback = {"callbacks": {"x": {"_target_": "subprocess.check_call", "args": ["touch", str(run / "hacked")]}}}
    for file in (run / ".hydra" / "hydra.yaml", run / ".hydra" / "conf" / "config.yaml"):
        tree = yaml.safe_load(file.read_text())
        tree["hydra"] |= callback
        file.write_text(yaml.safe_dump(tree))
    for words in (["--info"], ["--cfg", "job"], ["train.max_steps=3"]):
        assert program(f"resume={run}", *words, "schedule=linear").returncode == 2
    tree["hydra"] = {"run": {"dir": str(run / "hacked")}, "job": {"env_set": {"X": "1"}, "chdir": True}}
    file.write_text(yaml.safe_dump(tree))
    assert program(f"resume={run}", "--info", "schedule=linear").returncode == 0
    assert not (run / "hacked").exists()
