"""The commands beside train.py: free text arrives as typed, a wrong setting is named with the right one, help has every
setting.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_fixtures import Call, is_user_error
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from common.errors import UserError
from data.config import TokenizerConfig
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.cli import help
from runner.cli.subcommand import quote_free_text, to_schema, value_kinds
from runner.config.resolve import resolve_model_run
from runner.fault_injection.harness import FaultsConfig
from runner.inference.chat import ChatConfig
from runner.inference.evaluate import EvaluateConfig
from runner.inference.inspect_rows import RowsConfig
from runner.launch.doctor import DoctorConfig
from runner.planning.command import PlanConfig
from runner.reporting.arms import CompareConfig
from runner.reporting.command import ReportConfig

SCHEMAS: dict[str, type] = {
    "chat": ChatConfig,
    "compare": CompareConfig,
    "evaluate": EvaluateConfig,
    "doctor": DoctorConfig,
    "faults": FaultsConfig,
    "plan": PlanConfig,
    "report": ReportConfig,
    "rows": RowsConfig,
    "tokenizer": TokenizerConfig,
}
ROOT = Path(__file__).parents[2]
SPECIAL = st.text(alphabet=st.sampled_from("\\'\"${}[]a ,=:?#你\n"), max_size=12)


def parsed(override: str) -> object:
    """The value that Hydra and OmegaConf read from an override."""
    return OmegaConf.to_container(
        OmegaConf.create({"value": OverridesParser.create().parse_override(override).value()}), resolve=True
    )["value"]


@given(SPECIAL | st.text(max_size=30))
@pytest.mark.slow
def test_free_text_reaches_the_command_to_the_character(text: str) -> None:
    if text != "null":
        (override,) = quote_free_text([f"prompt={text}"], {"prompt": "str"})
        assert parsed(override) == text


@given(SPECIAL)
def test_one_value_for_a_list_setting_is_a_list_of_one(text: str) -> None:
    if text != "null" and not text.startswith("["):
        (override,) = quote_free_text([f"path={text}"], {"path": "list"})
        assert parsed(override) == [text]


def test_values_that_are_no_free_text_are_left_alone() -> None:
    typed = ["top_k=5", "prompt", "prompt=null", "data.path=a,b", "path=[a,b]", "path=null"]
    assert quote_free_text(typed, {"prompt": "str", "path": "list", "top_k": "int"}) == typed


REFUSED = [
    (["chat.py", "run=x", "promt=hi"], ["chat.py has no setting promt", "did you mean prompt?"]),
    (
        ["chat.py", "run=x", "temperature=warm"],
        ["temperature must be a number, got warm", "temperature=warm", "temperature=5e-4"],
    ),
    (["chat.py", "run=x", "top_p=3"], ["top_p=3"]),
    (["chat.py"], ["run has no value", "run=<value>"]),
    (["chat.py", "run=x", "temperature=[1"], ["cannot be parsed", "temperature=[1", "quote it"]),
    (["chat.py", "run=x", "temperature=0.1,0.2"], ["temperature takes one value", "temperature=0.1,0.2"]),
    (["chat.py", "run=x", "+seed=1"], ["key=value", "+seed=1"]),
    (["chat.py", "run=x", "--seed", "3"], ["--seed is not a flag", "seed=3"]),
    (["chat.py", "--run", "last"], ["--run is not a flag", "run=last"]),
    (["chat.py", "run=x", "seed=null"], ["seed must be an integer, got null", "seed=null"]),
    (["chat.py", "run=x", "top_k=1.5"], ["top_k must be an integer, got 1.5"]),
    (["chat.py", "run=x", "max_new_tokens=1e3"], ["must be an integer, got 1e3", "fix:   max_new_tokens=1000"]),
    (["rows.py", "ids=maybe"], ["ids must be true or false, got maybe", "ids=true or ids=false"]),
    (["chat.py", "run=x", "--multirun"], ["chat.py has no flag --multirun"]),
    (["evaluate.py", "run=x", "data.path=y", "metric=blue"], ["metric=blue", "perplexity"]),
    (["evaluate.py", "run=x", "data.path=y", "data.max_length=0"], ["data.max_length=0"]),
    (["evaluate.py", "run=x", "data.path=y", "show=-1"], ["show=-1"]),
    (["evaluate.py", "run=x", "data.path=y", "limit=5"], ["limit is not read", "tasks=[hellaswag] reads it"]),
    (["evaluate.py", "run=x", "data.path=y", "show=0"], ["show is not read", "metric=exact_match reads it"]),
    (["evaluate.py", "run=x", "tasks=[a]", "max_new_tokens=9"], ["max_new_tokens is not read"]),
    (
        ["evaluate.py", "run=x", "data.path=y", "metric=exact_match", "reference=z"],
        ["reference is not read", "metric=preference reads it"],
    ),
    (
        ["export.py", "run=x", "to=y", "format=gguf", "max_shard_size=1GB"],
        ["max_shard_size is not read", "format=hf reads it"],
    ),
    (["evaluate.py", "run=last", "data.path=y"], ["run=last", "train one"]),
    (["report.py", "sweep=last"], ["there is no sweep", "sweep=last"]),
    (["rows.py", "stage=sft", "n=-1"], ["n=-1"]),
    (["rows.py", "n=1", "optimizer.lrr=3"], ["unknown setting optimizer.lrr", "optimizer.lr"]),
    (["rows.py", "--epochs", "3"], ["--epochs is not a flag", "train.epochs=3"]),
    (["rows.py", "--cfg", "job"], ["rows.py has no flag --cfg=job"]),
    (["rows.py", "resume=x"], ["rows.py does not resume a run"]),
    (
        ["faults.py", "kills=0", "disk=0", "flips=0", "signals=0", "workers=0"],
        ["there is no fault to inject", "kills=20"],
    ),
    (["tokenizer.py", "to=y"], ["path has no value", "path=<value>"]),
    (["tokenizer.py", "pth=x"], ["tokenizer.py has no setting pth", "did you mean path?"]),
    (
        ["tokenizer.py", "path=x", "to=y", "vocab_size=abc"],
        ["vocab_size must be an integer, got abc", "vocab_size=abc"],
    ),
    (
        ["tokenizer.py", "path=x", "tokenizer=y", "vocab_size=300"],
        ["vocab_size is not read", "to=my_tokenizer reads it"],
    ),
    (["tokenizer.py", "path=x", "to=y", "max_lines=-3"], ["max_lines=-3"]),
    (["tokenizer.py", "path=[]", "to=y"], ["path=[]", "[text.jsonl,chats.jsonl]"]),
    (["tokenizer.py", "path=[it's,x]", "to=y"], ["no such file or folder: it's", "path=[it's,x]", "is quoted"]),
    (["tokenizer.py", "path=x", "to=/dev/null"], ["to=/dev/null"]),
    (["tokenizer.py", "path=a, it's.jsonl", "to=y"], ["a, it's.jsonl", "check the path"]),
]


@pytest.mark.parametrize(("argv", "parts"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_subcommand_refuses_wrong_settings_in_three_lines(
    call_command: Call, argv: list[str], parts: list[str]
) -> None:
    result = call_command(*argv)
    assert is_user_error(result), result
    assert [part for part in parts if part not in result.stderr] == [], result.stderr


@pytest.mark.slow
def test_subcommand_help_and_user_errors_import_no_torch() -> None:
    script = f"""
import runpy, sys
for name in {list(SCHEMAS)}:
    for argv in (["--help"], ["no_such_setting=1"]):
        sys.argv = [f"{{name}}.py", *argv]
        try:
            runpy.run_path(f"runner/{{name}}.py", run_name="__main__")
        except SystemExit as exit:
            print(name, "exits with", exit.code)
    print(name, "imports", [heavy for heavy in ("torch", "transformers", "tokenizers") if heavy in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    assert [
        line for name in SCHEMAS for line in (f"{name} exits with 2", f"{name} imports []") if line not in lines
    ] == [], done.stderr


@pytest.mark.parametrize("name", SCHEMAS)
def test_settings_in_conf_are_those_of_the_dataclass_and_in_help(call_command: Call, name: str) -> None:
    defaults = help.default_settings(name)
    assert list(defaults) == list(value_kinds(SCHEMAS[name]))
    page = call_command(f"{name}.py", "-h").stdout
    assert [key for key in defaults if f"  {key}=" not in page] == []


def test_subcommand_prints_its_config(call_command: Call) -> None:
    result = call_command("chat.py", "--cfg", "job", "prompt=yes, but")
    assert result.returncode == 0 and "prompt: yes, but" in result.stdout


def test_settings_are_converted_to_the_types_of_the_dataclass() -> None:
    defaults = help.default_settings("chat")
    assert to_schema(OmegaConf.create({**defaults, "run": "x", "temperature": 1}), ChatConfig).temperature == 1.0


def test_run_last_is_the_run_whose_model_was_completed_last(workspace: Path) -> None:
    with pytest.raises(UserError, match="has completed a model"):
        resolve_model_run("last")
    for age, name in (
        (30, "2026-01-01/10-00-00"),
        (10, "2026-01-01/09-00-00"),
        (20, "multirun/2026-01-02/10-00-00/lr=1"),
    ):
        model = workspace / "outputs" / name / "model"
        model.mkdir(parents=True)
        (model.parent / "run.json").write_text("{}")
        os.utime(model, (time.time() - age, time.time() - age))
    unfinished = workspace / "outputs" / "2026-01-03" / "10-00-00"
    unfinished.mkdir(parents=True)
    (unfinished / "run.json").write_text("{}")
    assert resolve_model_run("last") == workspace / "outputs" / "2026-01-01" / "09-00-00"
    assert resolve_model_run("some/folder/of/mine") == Path("some/folder/of/mine")


def test_skipped_checkpoint_is_named_where_last_means_an_older(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    for step in (1, 2):
        write_atomic_dir(tmp_path / "checkpoints", f"step-{step:08}", {"state.json": [b"{}"]}, {})
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_bytes(b"[]")
    assert resolve_model_run(f"{tmp_path}@last").name == "step-00000001"
    assert "checkpoint step-00000002 skipped: " in capsys.readouterr().err
