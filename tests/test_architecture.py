"""Which room may know what. The rules are read off the source, so that a line in the wrong room fails today and not in a year."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(file for package in ("runner", "models", "data") for file in (ROOT / package).rglob("*.py"))
COMMANDS = [file for file in FILES if file.parent == ROOT / "runner" and file.stem != "__init__"]
ENGINE, LAUNCH, TRAINED = ([file for file in FILES if file.parent == ROOT / "runner" / room] for room in ("engine", "launch", "trained"))

# What these two rooms may import beside Python's own modules and themselves.
OUTSIDE = {"models": {"torch", "safetensors"}, "data": {"torch", "tokenizers", "numpy", "jinja2", "pyarrow", "datasets"}}
# A file of the engine imports files of lower layers only. One that is not named here stands on the ground: it imports no other file of the engine.
LAYERS = [
    {"optim", "track", "durable"},
    {"precision"},
    {"objective"},
    {"stage", "found"},
    {"config"},
    {"identity", "feed"},
    {"run"},
    {"build"},
    {"checkpoint", "judging", "settle"},
    {"export"},
    {"loop"},
    {"verify"},
]
EXECUTES = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.full_load", "yaml.unsafe_load"}
UNPICKLES = {"dill", "cloudpickle", "joblib", "marshal", "shelve"}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports(file: Path) -> Iterator[str]:
    """Every name a file imports, also inside functions and under TYPE_CHECKING: `from a import b` gives `a.b`."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(file)}:{node.lineno} imports by dots; these tests read whole names"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(files: list[Path]) -> Iterator[tuple[str, str]]:
    return ((name_of(file), name) for file in files for name in imports(file))


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(where, what is called, its keywords) of every call."""
    for file in FILES:
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call):
                yield f"{name_of(file)}:{node.lineno}", ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}


def package(name: str) -> str:
    return name.split(".")[0]


def layer(module: str) -> int:
    return next((height for height, names in enumerate(LAYERS, start=1) if module in names), 0)


def test_models_and_data_know_neither_the_runner_nor_each_other():
    for room, known in OUTSIDE.items():
        files = [file for file in FILES if package(name_of(file)) == room]
        assert [edge for edge in edges(files) if package(edge[1]) not in known | {room} | sys.stdlib_module_names] == []


def test_the_engine_imports_downwards_only():
    inner = [(file, name.split(".")[2]) for file, name in edges(ENGINE) if name.startswith("runner.engine.")]
    assert [edge for edge in inner if layer(edge[1]) >= layer(edge[0].split(".")[2])] == []


def test_the_engine_and_what_uses_a_trained_model_know_no_launch():
    assert [edge for edge in edges(ENGINE) if package(edge[1]) == "runner" and not edge[1].startswith("runner.engine.")] == []
    assert [edge for edge in edges(TRAINED) if package(edge[1]) == "runner" and not edge[1].startswith(("runner.engine.", "runner.trained."))] == []


def test_only_the_launch_and_the_commands_know_hydra():
    assert [
        edge for edge in edges(FILES) if package(edge[1]) in ("hydra", "omegaconf") and ROOT / (edge[0].replace(".", "/") + ".py") not in LAUNCH + COMMANDS
    ] == []


def test_only_one_file_knows_torch_distributed():
    here = "runner.engine.device.distributed"
    assert [edge for edge in edges(FILES) if edge[1].startswith("torch.distributed") and edge[0] != here] == []
    assert [where for where, function, _ in calls() if function.startswith("torch.distributed") and not where.startswith(here)] == []


def test_nothing_imports_a_command_and_a_command_defines_no_class():
    """Run by its path a command is __main__; imported as well, what it defines would exist twice."""
    commands = {name_of(command) for command in COMMANDS}
    assert [edge for edge in edges(FILES) if commands & {edge[1], edge[1].rpartition(".")[0]}] == []
    assert [name_of(command) for command in COMMANDS if any(isinstance(node, ast.ClassDef) for node in ast.walk(tree(command)))] == []


def test_a_command_begins_with_a_line_that_runs():
    assert [name_of(command) for command in COMMANDS if f"`python runner/{command.name}" not in (ast.get_docstring(tree(command)) or "")] == []


def test_nothing_that_is_read_is_executed():
    assert [
        edge
        for edge in edges(FILES)
        if package(edge[1]) in UNPICKLES or edge[1] in ("torch.load", "yaml.load", "hydra.utils.instantiate") or edge[1].startswith("pickle.")
    ] == []
    # data/store/workers.py talks to its own children over pipes of its own; nothing on a disk is ever unpickled.
    others = [file for file in FILES if name_of(file) != "data.pool"]
    pickle = [ast.unparse(node) for file in others for node in ast.walk(tree(file)) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"]
    assert set(pickle) <= {"pickle.UnpicklingError"}  # what torch.load(weights_only=True) raises may be caught
    assert [(where, function) for where, function, _ in calls() if function in EXECUTES or function.endswith("instantiate")] == []
    assert [where for where, function, words in calls() if function == "torch.load" and words.get("weights_only") != "True"] == []
    assert [
        where
        for where, _, words in calls()
        if words.get("shell", "False") != "False" or words.get("trust_remote_code", "False") != "False" or "allow_pickle" in words
    ] == []
    assert [file.name for file in (ROOT / "conf").rglob("*.yaml") if "_target_" in file.read_text(encoding="utf-8")] == []


def test_a_config_class_holds_names_and_types_and_no_values():
    """Values stand in conf/*.yaml; in a second place they would one day differ."""
    classes = [node for file in FILES for node in ast.walk(tree(file)) if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    assert [node.name for node in classes if any(isinstance(item, ast.AnnAssign) and item.value for item in node.body)] == []


def test_a_command_can_refuse_before_torch_is_there():
    modules = ["runner.engine.config", *(name_of(file) for file in LAUNCH + COMMANDS if file.stem != "__init__")]
    heavy = {"torch", "transformers", "swanlab"}
    code = f"import sys, {', '.join(modules)}\nprint(sorted({heavy} & sys.modules.keys()))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("[]\n", "")
