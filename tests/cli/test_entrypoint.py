"""The command as a person meets it: from any folder, quick to answer, three lines where a word is wrong, an exit code for every end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from runner.run_dir import naming

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16", "model.intermediate_size=32",
    "train.max_steps=2", "train.batch_size=2", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "data.max_length=32", "data.val_path=null", "device=cpu",
]  # fmt: skip

Program = Callable[..., subprocess.CompletedProcess]


def runs(outputs: Path) -> list[Path]:
    return sorted(record.parent for record in outputs.rglob("run.json"))


def imported(done: subprocess.CompletedProcess) -> set[str]:
    """What a program that was started with -X importtime has imported."""
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")}


LIGHT = [("--cfg", "job"), ("--help",), ("--shell-completion", "query=bash"), ("optimizer.lrr=1",), ("precision.name=fp4",), ("data.path=nowhere.jsonl",)]


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_what_needs_no_torch_imports_none(program: Program, words: tuple[str, ...]) -> None:
    found = imported(program(*words, flags=("-X", "importtime"), COMP_LINE="python runner/train.py stage="))
    assert "runner.cli.entrypoint" in found and not {"torch", "transformers", "swanlab", "tokenizers"} & found


# Of what is installed here: libraries that something else needs, and torch's compiler, which torch's own optimizers and custom_op would bring in.
UNUSED = "accelerate datasets matplotlib pandas peft plotly pyarrow rich scipy sklearn swanlab sympy torch._dynamo torch._inductor transformers trl".split()


@pytest.mark.parametrize("stage", ["pretrain", "lora"])
def test_a_run_imports_nothing_that_it_does_not_use(program: Program, tmp_path: Path, stage: str) -> None:
    words = [f"stage={stage}", "init_from=scratch", *SMALL, f"hydra.run.dir={tmp_path / 'run'}", "tracker.console=plain"]
    done = program(*words, flags=("-X", "importtime"))
    assert done.returncode == 0 and "completed" in done.stdout, done.stderr
    found = imported(done)
    assert "torch" in found
    assert [name for name in found if any(name == unused or name.startswith(f"{unused}.") for unused in UNUSED)] == []


def test_a_wrong_word_ends_in_three_lines_and_code_2_before_any_folder_is_made(program: Program, outputs: Path, tmp_path: Path) -> None:
    for words in (
        ["optimizer.lrr=1"],
        ["train.epochs=x"],
        ["precision.name=fp4"],
        ["data.path=nowhere.jsonl"],
        ["init_from=nowhere"],
        ["-m", "optimizer.lr=1e-3,x"],
        ["resume=nowhere"],
        ["--epochs", "3"],
        ["-m", "seed=1,2", "--cfg", "job"],
    ):
        started = time.monotonic()
        done = program(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "where", "fix"], done.stderr
        assert time.monotonic() - started < 10  # 0.4 s on a quiet machine; here others may be at work
    assert not outputs.exists() and not list(tmp_path.iterdir())


def test_a_refusal_shows_its_traceback_to_who_asks_for_it(program: Program) -> None:
    done = program("optimizer.lrr=1", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_the_composed_config_is_printed_and_nothing_else_happens(program: Program, outputs: Path) -> None:
    done = program("stage=sft", "--cfg", "job")
    assert done.returncode == 0 and yaml.safe_load(done.stdout)["stage"]["name"] == "sft"
    assert not outputs.exists()


def test_paths_are_looked_at_as_a_run_would_get_them(program: Program, tmp_path: Path) -> None:
    (tmp_path / "optimizer.lr=0.1,seed=1").mkdir()
    (tmp_path / "rows.jsonl").touch()
    done = program("init_from=optimizer.lr=0.1,seed=1", "data.path=rows.jsonl", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["init_from"], shown["data"]["path"]) == (str(tmp_path / "optimizer.lr=0.1,seed=1"), str(tmp_path / "rows.jsonl"))


def test_help_names_every_group_option_and_command(program: Program, checkout: Path) -> None:
    page = program("--help").stdout
    options = [file.stem for group in (checkout / "conf").iterdir() if group.is_dir() for file in group.glob("*.yaml")]
    commands = [file.name for file in (checkout / "runner").glob("*.py") if file.stem != "__init__"]
    assert [word for word in [*options, *commands] if word not in page] == []


@pytest.mark.parametrize(("line", "expected"), [("stage=", "stage=sft"), ("optimizer.l", "optimizer.lr="), ("precision=b", "precision=bf16")])
def test_tab_completes_groups_options_and_words(program: Program, line: str, expected: str) -> None:
    done = program("--shell-completion", "query=bash", COMP_LINE=f"python runner/train.py {line}")
    assert expected in done.stdout.split()


def test_the_program_runs_as_a_module_too(checkout: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "runner.train", "--cfg", "job"], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and "stage:" in done.stdout


def test_a_run_ends_well_in_a_folder_of_its_own(program: Program, outputs: Path) -> None:
    done = program(*SMALL)
    assert done.returncode == 0, done.stderr
    (run,) = runs(outputs)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", run.relative_to(outputs).as_posix())
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["step"], record["stage"], record["init_from"]) == ("completed", 2, "pretrain", "scratch")
    assert (run / ".hydra" / "config.yaml").is_file() and (run / "model" / "config.json").is_file()
    lines = (run / "train.log").read_text().splitlines()
    assert lines and not [line for line in lines if line.startswith("[20")], "the log holds what the engine says, and it once"


def test_a_run_placed_where_one_stands_changes_no_byte_of_it(program: Program, outputs: Path, tmp_path: Path) -> None:
    here = f"hydra.run.dir={tmp_path / 'mine'}"
    assert program(*SMALL, here).returncode == 0
    before = {path: path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file() and path.name != ".lock"}
    done = program(*SMALL, here, "seed=3")
    assert done.returncode == 2 and "already holds a run" in done.stderr
    assert {path: path.read_bytes() for path in before} == before and not outputs.exists()


@pytest.mark.slow
def test_a_sweep_trains_every_combination_in_a_folder_named_by_it(program: Program, outputs: Path) -> None:
    done = program("-m", *SMALL, "optimizer.lr=1e-3,2e-3", "seed=range(1,3)")
    assert done.returncode == 0, done.stderr
    names = [run.name for run in runs(outputs)]
    assert names == [f"optimizer.lr={lr},seed={seed}" for lr in ("0.001", "0.002") for seed in (1, 2)]
    assert {run.parents[2].name for run in runs(outputs)} == {"multirun"}


def test_a_job_that_is_refused_does_not_end_the_sweep(program: Program, outputs: Path, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.jsonl", tmp_path / "good.jsonl"
    bad.write_text('{"txt": 1}\n')
    good.write_text('{"text": "one two three four"}\n' * 20)
    done = program("-m", *SMALL, f"data.path={bad},{good}")
    assert done.returncode == 1 and str(bad) in done.stderr
    assert sorted(json.loads((run / "run.json").read_text())["status"] for run in runs(outputs)) == ["completed", "new"]


def test_of_two_launches_in_one_second_each_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "REPO_ROOT", tmp_path)
    taken = set()
    for _ in range(4):
        monkeypatch.setattr(naming, "_created", [])
        naming.create_unique(sweep=False)
        taken.add(naming.run_id())
    assert len(taken) == 4 and all((tmp_path / "outputs" / name).is_dir() for name in taken)


def test_a_job_s_folder_is_named_by_what_is_swept_whatever_the_order() -> None:
    assert naming.job_dirname({"seed": "3", "optimizer.lr": "0.1"}) == naming.job_dirname({"optimizer.lr": "0.1", "seed": "3"}) == "optimizer.lr=0.1,seed=3"
    one, two = (naming.job_dirname({"optimizer.lr": "0.1", "data.path": f"/a/{'long/' * 60}{end}.jsonl"}) for end in "xy")
    assert one != two and max(len(one), len(two)) <= naming.NAME_LENGTH and "/" not in one
