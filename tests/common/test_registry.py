"""Registry: names of modules and plugins, imported on first use only."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.registry import Registry, check_imported, locate_plugin
from runner.config.literals import parse_value

ENTRY = """
from registry_owner import COLORS

@COLORS.register("red")
class Red: ...
"""


@pytest.fixture
def colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    (tmp_path / "color_modules").mkdir()
    (tmp_path / "color_modules" / "__init__.py").touch()
    (tmp_path / "color_modules" / "helper.py").touch()
    (tmp_path / "color_modules" / "red.py").write_text(ENTRY)
    registry: Registry[type] = Registry("color", "color_modules", helpers=("helper",))
    monkeypatch.syspath_prepend(tmp_path)
    owner = type(sys)("registry_owner")
    owner.COLORS = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "registry_owner", owner)
    yield registry
    for name in [name for name in sys.modules if name.startswith("color_modules")]:
        del sys.modules[name]


def test_registry_names_modules_and_plugins_without_importing_them(colors: Registry[type]) -> None:
    colors.register("blue")(int)
    assert colors.names() == ["blue", "red"] and "color_modules.red" not in sys.modules


def test_registry_imports_a_module_when_its_entry_is_used(colors: Registry[type]) -> None:
    assert colors.get("red").__name__ == "Red" and colors.entries() == {"red": colors.get("red")}


def test_registry_refuses_unknown_and_duplicate_names(colors: Registry[type]) -> None:
    with pytest.raises(UserError, match="color must be one of red, got rad") as caught:
        colors.get("rad")
    assert (caught.value.setting, caught.value.fix) == ("color=rad", "did you mean red?")
    colors.register("blue")(int)
    with pytest.raises(UserError, match="registered twice"):
        colors.register("blue")(str)


def test_registry_refuses_a_plugin_with_the_name_of_a_module(colors: Registry[type]) -> None:
    colors.register("red")(int)
    with pytest.raises(UserError, match="registered twice"):
        colors.get("red")


@pytest.mark.parametrize("name", ["", ".", "mine.txt", "mine.2"])
def test_plugin_name_is_read_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="neither an importable module nor a file"):
        locate_plugin(name)
    assert locate_plugin("mine") == str(tmp_path / "mine.py")


def test_plugin_that_is_missing_has_a_fix_for_a_path_with_a_comma() -> None:
    with pytest.raises(UserError) as error:
        check_imported(["/my data/a,b.py"])
    _, typed, *_ = shlex.split(str(error.value.fix))
    assert parse_value(typed) == ["/my data/a,b.py"]
