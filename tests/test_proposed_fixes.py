"""Every fix that an error proposes names settings, values, commands and files that exist: the list of fixes is made from
the calls that create errors.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from common.errors import UserError
from common.settings import flat_settings
from runner.config.compose import compose_tree, to_config, without_hydra
from runner.config.schema import config_groups, config_schema
from runner.run_dir.saved_config import load_yaml
from runner.sweep.backends import LAUNCHERS
from runner.sweep.optuna_search import SWEEPERS

ROOT = Path(__file__).parents[1]
PACKAGES = ("common", "data", "hydra_plugins", "lm_runner", "models", "runner")
FIX_NAMES = re.compile(r"fix|hint|FIX|\w+_(?:HINT|FIX)")  # variables that hold a fix, or a part of one
KEY = r"[a-z_]\w*(?:[./][a-z_]\w*)*"
OVERRIDE = re.compile(rf"(?<![\w.=/$-])({KEY})=([^\s;'`]*)")
QUOTED = re.compile(rf"""'({KEY})=([^']*)'|"({KEY})=([^"]*)\"""")  # for the shell
PLACEHOLDER = re.compile(r"\.\.\.|<|\b[A-Z]{1,}\b")  # in a value: DIR, N, <value>
COMMAND = re.compile(r"\b(?:runner/)?(\w+)\.py\b((?: [a-z_.]+=\S+)*)")
# what looks like an override and is another program's, or a field of a file
NO_SETTINGS = {"key", "data_format", "max_position_embeddings", "path_initial_model_for_weight_conversion"}
OTHER_SCRIPTS = {"convert_hf_to_gguf", "FILE"}
# beginning of a key -> what the run has chosen where the fix is proposed
CONTEXTS = {
    "stage.neftune_alpha": ["stage=sft"],
    "distributed.": ["distributed=ddp", "device=cpu"],
    "model.rope_scaling.": [
        "init_from=scratch",
        "model.rope_scaling={type: yarn, factor: 2.0, original_max_position_embeddings: 512}",
    ],
    "schedule.decay_fraction": ["schedule=wsd"],
    "stage.lora.": ["stage=lora"],
    "stage.": ["stage=dpo"],
    "tracker.": ["tracker=swanlab"],
}


class Fix(NamedTuple):
    where: str  # FILE:LINE
    text: str  # `<expression>` where a value is put in

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


@functools.cache
def proposed_fixes() -> list[Fix]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [
        Fix(f"{path.relative_to(ROOT)}:{line}", with_constants(text, path))
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for value in fix_expressions(node)
        for line, text in texts_in(value)
    ]


def with_constants(text: str, path: Path) -> str:
    """Return a text of a module with the values of its constants, which were put in by name."""
    if not (names := re.findall(r"<([A-Z_]+)>", text)):
        return text
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name in names:
        text = text.replace(f"<{name}>", str(getattr(module, name, f"<{name}>")))
    return text


def fix_expressions(node: ast.AST) -> list[ast.expr]:
    """Return the expressions of fixes that a call or an assignment has."""
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return [node.value] if any(map(FIX_NAMES.fullmatch, names)) else []
    if not isinstance(node, ast.Call):
        return []
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    example = [ast.JoinedStr([node.args[0], ast.Constant("="), node.args[-1]])] if name == "check_at_least" else []
    return [
        *(keyword.value for keyword in node.keywords if keyword.arg == "fix"),
        *(node.args[2:] if name.endswith("Error") else []),
        *([ast.copy_location(each, node) for each in example if len(node.args) == 4]),
    ]


def texts_in(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the outermost texts of an expression."""
    if text := text_of(node):
        yield getattr(node, "lineno", 0), text
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"<{ast.unparse(part.value)}>" if isinstance(part, ast.FormattedValue) else text_of(part)
            for part in node.values
        )
    return ""


def command_settings() -> dict[str, set[str]]:
    """Return the settings of each command but train.py."""
    found = {}
    for path in (ROOT / "runner").glob("*.py"):
        if match := re.search(r'run_subcommand\("(\w+)", (\w+)(.*)', source := path.read_text()):
            module = re.search(rf"from (\S+) import .*\b{match[2]}\b", source)
            assert module is not None
            names = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module[1]), match[2]))}
            conf = load_yaml(ROOT / "conf" / f"{match[1]}.yaml")
            names |= {key for key, _ in flat_settings(conf)}  # data.path of evaluate.py
            found[match[1]] = names | (train_settings() if "with_train_config" in match[3] else set())
    return found


def train_settings() -> set[str]:
    return {*config_schema(), *config_groups(), "hydra/launcher", "hydra/sweeper"} | {
        f"hydra.{group}.{field.name}"
        for group, nodes in (("launcher", LAUNCHERS), ("sweeper", SWEEPERS))
        for node in nodes.values()
        for field in dataclasses.fields(node)
    }


def is_of_hydra(key: str) -> bool:
    return key in ("hydra.run.dir", "hydra.sweep.dir")


@pytest.mark.slow
def test_fixes_are_found() -> None:
    assert len(proposed_fixes()) > 450
    assert sum(bool(OVERRIDE.search(fix.text)) for fix in proposed_fixes()) > 120


def test_every_setting_of_a_fix_exists() -> None:
    known = train_settings() | {name for names in command_settings().values() for name in names} | NO_SETTINGS
    assert [
        f"{fix} has {key}"
        for fix in proposed_fixes()
        for key, _ in OVERRIDE.findall(fix.text)
        if key not in known and not is_of_hydra(key)
    ] == []


def literal_overrides() -> dict[str, str]:
    """Return each override whose value is written out, and the first fix that has it."""
    known, found = {*config_schema(), *config_groups()} - {"run", "sweep"}, {}
    for fix in proposed_fixes():
        text = fix.text.replace("train.max_steps=N", "train.max_steps=100")
        quoted = [(key or other, value or text) for key, value, other, text in QUOTED.findall(text)]
        bare = [(key, value.rstrip(").,:")) for key, value in OVERRIDE.findall(QUOTED.sub("", text))]
        for key, value in quoted + bare:
            if value and not PLACEHOLDER.search(value) and key in known:
                found.setdefault(f"{key}={value}", str(fix))
    return found


@pytest.mark.slow
def test_every_written_out_override_of_a_fix_can_be_typed() -> None:
    faults, overrides = [], literal_overrides()
    assert len(overrides) > 60  # examples of limits: tests/common/test_settings.py
    for override, fix in overrides.items():
        if override == "optimizer.lr=1e-4,5e-4":  # of a sweep
            continue
        before = next((values for start, values in CONTEXTS.items() if override.startswith(start)), [])
        try:
            to_config(without_hydra(compose_tree([*before, override])))
        except UserError as error:
            faults.append(f"{fix}: {override} is refused: {error.message}; {error.fix}")
    assert faults == []


def test_every_command_of_a_fix_exists_with_its_settings() -> None:
    commands, faults = {"train": train_settings(), **command_settings()}, []
    for fix in proposed_fixes():
        for name, overrides in COMMAND.findall(fix.text):
            if name not in commands:
                faults += [] if name in OTHER_SCRIPTS or (ROOT / f"{name}.py").exists() else [f"{fix} has {name}.py"]
                continue
            keys = [key for key, _ in OVERRIDE.findall(overrides)]
            faults += [f"{fix}: {name}.py has no {key}" for key in keys if key not in commands[name] | {"resume"}]
    assert faults == []


def test_every_package_and_file_of_a_fix_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {extra for fix in proposed_fixes() for extra in re.findall(r"(?:lm-runner|\.)\[(\w+)\]", fix.text)}
    files = {file for fix in proposed_fixes() for file in re.findall(r"\b(?:conf|data|docs)/[\w/]+\.\w+", fix.text)}
    assert len(extras) > 2 and len(files) > 1
    assert extras <= project["optional-dependencies"].keys() and all((ROOT / file).exists() for file in files)
