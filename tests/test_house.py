"""The house rules, held by the machine: who imports whom, and what is never written at all."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"models": {"models"}, "data": {"data"}, "runner": {"runner", "models", "data"}}
CODE = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
SAID_BY_THE_LAUNCH = {"hydra", "omegaconf"}
HEAVY = {"torch", "transformers", "swanlab", "peft", "safetensors"}
MAY_START_HEAVY = {
    *(f"models/{name}.py" for name in ("decoder", "lora", "generate", "hub")),
    "data/loader.py",
    *(f"runner/engine/{name}.py" for name in ("objective", "loop", "checkpoint", "identity", "randomness", "mirror_swanlab")),
}
# In the engine a room may use those before it, and the sections of config.py.
FLOORS = [{"optim", "precision", "distributed", "track"}, {"objective"}, {"stage"}, {"run"}, {"checkpoint"}, {"loop"}]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it enters"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_start(tree: ast.Module) -> Iterator[str]:
    """Imports that happen when the module is imported: not those inside functions, nor those for type checkers."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(ast.Module([node], []))
        waiting.extend(ast.iter_child_nodes(node))


def without_type_checking(tree: ast.Module) -> ast.Module:
    return ast.Module([node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))], [])


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_rooms_import_only_the_rooms_below_them(path: Path) -> None:
    allowed = ROOMS[path.relative_to(ROOT).parts[0]]
    for word in imports(parsed(path)):
        top = word.split(".")[0]
        assert top not in ROOMS or top in allowed, f"{name(path)} imports {word}"


@pytest.mark.parametrize("path", CODE, ids=name)
def test_hydra_stays_at_the_door(path: Path) -> None:
    is_door = path.parent == ROOT / "runner" or path.parent == ROOT / "runner" / "launch"
    found = {word.split(".")[0] for word in imports(parsed(path))} & SAID_BY_THE_LAUNCH
    assert is_door or not found, f"{name(path)} knows {', '.join(found)}"


@pytest.mark.parametrize("path", CODE, ids=name)
def test_importing_a_module_is_cheap(path: Path) -> None:
    found = {word.split(".")[0] for word in at_start(parsed(path))} & HEAVY
    assert name(path) in MAY_START_HEAVY or not found, f"{name(path)} imports {', '.join(found)} before it is asked to do anything"


@pytest.mark.parametrize("path", sorted((ROOT / "runner" / "engine").glob("*.py")), ids=name)
def test_the_engine_is_built_upward(path: Path) -> None:
    floor = next((i for i, rooms in enumerate(FLOORS) if path.stem in rooms), None)
    used = {word.split(".")[2] for word in imports(without_type_checking(parsed(path))) if word.startswith("runner.engine.")}
    above = {room for i, rooms in enumerate(FLOORS) for room in rooms if floor is not None and i > floor} & used
    assert not above, f"{name(path)} imports {', '.join(sorted(above))}, which stands above it"
    assert floor is None or "runner.launch" not in " ".join(imports(parsed(path)))


def calls(tree: ast.AST) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}


FORBIDDEN = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "hydra.utils.instantiate", "instantiate", "torch.hub.load"}
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("path", CODE, ids=name)
def test_nothing_that_is_read_is_ever_run(path: Path) -> None:
    tree = parsed(path)
    assert not {word.split(".")[0] for word in imports(tree)} & UNPICKLERS
    for function, keywords in calls(tree):
        assert function not in FORBIDDEN, f"{name(path)} calls {function}"
        assert "shell" not in keywords, f"{name(path)}: {function} starts a shell"
        if function.endswith("torch.load"):
            only = keywords.get("weights_only")
            assert isinstance(only, ast.Constant) and only.value is True, f"{name(path)}: torch.load without weights_only=True"
        if function.endswith(("np.load", "numpy.load")):
            assert "allow_pickle" not in keywords
        trusted = keywords.get("trust_remote_code")
        assert trusted is None, f"{name(path)}: {function} would run a stranger's code"


def test_no_class_stands_in_a_command() -> None:
    # Run by path a command is __main__, imported it is runner.<name>: a class in it would exist twice.
    for path in (ROOT / "runner").glob("*.py"):
        assert not [node for node in parsed(path).body if isinstance(node, ast.ClassDef)], name(path)


def test_a_command_says_how_it_is_run() -> None:
    for path in (ROOT / "runner").glob("*.py"):
        if path.stem != "__init__":
            said = ast.get_docstring(parsed(path)) or ""
            assert f"python runner/{path.name}" in said, f"{name(path)} has no line that runs in its docstring"
