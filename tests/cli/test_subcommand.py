"""The small commands: free text arrives as typed, and a wrong word is named with the right one, at once."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data.tokenize.tokenizer_corpus import TokenizerConfig
from runner.cli import help, subcommand
from runner.cli.subcommand import quote_free_text, resolve_model_run, to_schema
from runner.inference.chat import ChatConfig
from runner.inference.evaluate import EvaluateConfig

SCHEMAS: dict[str, type] = {"chat": ChatConfig, "evaluate": EvaluateConfig, "tokenizer": TokenizerConfig}
ROOT = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, cwd="/", timeout=60)


@given(st.text(alphabet=st.sampled_from("\\'\"${}[]a ,=:?#你\n"), max_size=12) | st.text(max_size=30))
def test_free_text_reaches_the_program_to_the_character(text: str) -> None:
    if text == "null":
        return
    (argument,) = quote_free_text([f"prompt={text}"], ("prompt",))
    override = OverridesParser.create().parse_override(argument)
    cfg = OmegaConf.create({"prompt": override.value()})
    assert OmegaConf.to_container(cfg, resolve=True) == {"prompt": text}


def test_other_words_and_flags_are_left_alone() -> None:
    given_words = ["top_k=5", "--cfg", "job", "prompt", "prompt=null", "data.path=a,b"]
    assert quote_free_text(given_words, ("prompt",)) == given_words


@given(st.text(alphabet=st.sampled_from("\\'\"${}[]a ,=:?#你\n"), max_size=12))
def test_one_value_is_a_list_of_one_to_the_character(text: str) -> None:
    if text == "null" or text.startswith("["):
        return
    (argument,) = quote_free_text([f"path={text}"], ("path",), ("path",))
    cfg = OmegaConf.create({"path": OverridesParser.create().parse_override(argument).value()})
    assert OmegaConf.to_container(cfg, resolve=True) == {"path": [text]}


def test_a_list_in_brackets_stays_one() -> None:
    assert quote_free_text(["path=[a,b]", "path=null"], ("path",), ("path",)) == ["path=[a,b]", "path=null"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["chat.py", "run=x", "promt=hi"], ["no such word", "promt", "did you mean prompt?"]),
        (["chat.py", "run=x", "temperature=warm"], ["temperature", "give it as float"]),
        (["chat.py", "run=x", "top_p=3"], ["top_p=3", "keeps every token"]),
        (["chat.py"], ["no value yet", "add run=<value>"]),
        (["chat.py", "run=x", "temperature=[1"], ["cannot be read", "temperature=[1", "put quotes"]),
        (["chat.py", "run=x", "temperature=0.1,0.2"], ["several values where one is meant", "temperature=0.1,0.2"]),
        (["evaluate.py", "run=x", "data.path=y", "metric=blue"], ["unknown metric", "perplexity, exact_match, preference"]),
        (["evaluate.py", "run=x", "data.path=y", "data.max_length=0"], ["data.max_length=0", "at least 2"]),
        (["evaluate.py", "run=x", "data.path=y", "show=-1"], ["show=-1", "0 (none) or more"]),
        (["tokenizer.py", "to=y"], ["no value yet", "add path=<value>"]),
        (["tokenizer.py", "pth=x"], ["no such word", "pth", "did you mean path?"]),
        (["tokenizer.py", "path=x", "to=y", "vocab_size=abc"], ["vocab_size", "give it as int"]),
        (["tokenizer.py", "path=x", "to=y", "max_lines=-3"], ["max_lines=-3", "positive whole number"]),
        (["tokenizer.py", "path=[]", "to=y"], ["path=[]", "[text.jsonl,chats.jsonl]"]),
        (["tokenizer.py", "path=[it's,x]", "to=y"], ["cannot be read", "path=[it's,x]", "put quotes"]),
        (["tokenizer.py", "path=x", "to=/dev/null"], ["to=/dev/null", "name a folder"]),
        (["tokenizer.py", "path=a, it's.jsonl", "to=y"], ["no such file", "a, it's.jsonl", "check the path"]),
    ],
)
def test_wrong_words_are_refused_at_once(words: list[str], parts: list[str]) -> None:
    begin = time.monotonic()
    done = run(str(ROOT / "runner" / words[0]), *words[1:])
    assert done.returncode == 2 and done.stdout == ""
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()] == ["error", "where", "fix"], done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
    assert time.monotonic() - begin < 5


def test_the_commands_show_their_words_without_torch() -> None:
    for command in SCHEMAS:
        probe = f"import sys; import runner.{command}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", probe], check=False, cwd=ROOT, timeout=60).returncode == 0


def test_every_word_of_conf_is_in_the_schema_and_the_other_way_round() -> None:
    for name, schema in SCHEMAS.items():
        tree = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
        del tree["defaults"], tree["hydra"]
        inner = {f"{key}.{word}" for key, value in tree.items() if isinstance(value, dict) for word in value}
        flat = inner | {key for key, value in tree.items() if not isinstance(value, dict)}
        assert flat == set(subcommand.value_kinds(schema))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_help_page_has_every_word_with_the_value_it_has_by_itself(name: str) -> None:
    tree = OmegaConf.load(ROOT / "conf" / f"{name}.yaml")
    words = [(word, str(yaml.safe_load(value) if value != "???" else value)) for word, value, _ in help._settings(name)]
    assert [word for word, _ in words] == list(subcommand.value_kinds(SCHEMAS[name]))
    for word, value in words:
        section, _, last = word.rpartition(".")
        assert value == str(OmegaConf.to_container(tree[section] if section else tree)[last])


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_command_has_a_help_page_of_its_own(name: str, flag: str) -> None:
    done = run("-X", "importtime", str(ROOT / "runner" / f"{name}.py"), flag)
    assert done.returncode == 0 and done.stdout.startswith(("Talk to", "Score a", "Train a tokenizer")) and f"runner/{name}.py" in done.stdout
    assert "Hydra is" not in done.stdout and "| torch" not in done.stderr and "| tokenizers" not in done.stderr


def test_last_is_the_model_that_was_finished_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subcommand, "REPO_ROOT", tmp_path)
    with pytest.raises(ValueError, match="no run has finished"):
        resolve_model_run("last")
    for age, name in ((30, "2026-01-01/10-00-00"), (10, "2026-01-01/09-00-00"), (20, "multirun/2026-01-02/10-00-00/lr=1")):
        model = tmp_path / "outputs" / name / "model"
        model.mkdir(parents=True)
        (model.parent / "run.json").write_text("{}")
        os.utime(model, (time.time() - age, time.time() - age))
    unfinished = tmp_path / "outputs" / "2026-01-03" / "10-00-00"
    unfinished.mkdir(parents=True)
    (unfinished / "run.json").write_text("{}")
    assert resolve_model_run("last") == tmp_path / "outputs" / "2026-01-01" / "09-00-00"
    assert resolve_model_run("some/folder") == Path("some/folder")


def test_no_module_of_launch_reaches_for_the_private_names_of_another() -> None:
    for file in (ROOT / "runner" / "launch").glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        taken = [name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("runner") for name in node.names]
        known = {name.asname or name.name for name in taken}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known}
        assert [name for name in [*known, *used] if name.startswith("_") and not name.startswith("__")] == [], file.name


def test_words_become_their_types() -> None:
    tree = yaml.safe_load((ROOT / "conf" / "chat.yaml").read_text())
    del tree["defaults"], tree["hydra"]
    assert to_schema(OmegaConf.create({**tree, "run": "x", "temperature": 1}), ChatConfig).temperature == 1.0
