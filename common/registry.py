"""Named implementations of the extension axes (trackers, optimizers, objectives), and plugins: modules of the user that
add to them.

`plugins=[my_package,my_optimizer.py]` is imported only when the user types it; child processes get the list in their
environment. A config that is read from a file never causes an import: `check_imported` refuses a config whose plugins
this command has not imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import shlex
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from common.errors import UserError
from common.settings import check_choice

T = TypeVar("T")
Entry = TypeVar("Entry")

PLUGINS_ENV = "RUNNER_PLUGINS"  # JSON list, inherited by ranks, data workers, tracker processes and jobs of a sweep
MAX_PLUGIN_FILES = 500  # Python files of one plugin that are recorded

IMPORTED_MODULES: dict[str, ModuleType] = {}  # imported by this process, by the name that the user typed
_inherited = False  # whether the plugins of the parent process were imported


@dataclass(eq=False)
class Registry(Generic[T]):
    """Implementations by the name that the user types, e.g. `tracker=swanlab`.

    Each is a module of `package` with that name, in `package` if that is a module, or in a plugin, and registers itself
    when it is imported:

        TRACKERS: Registry[type[TrackerConfig]] = Registry("tracker", "runner.tracking.trackers")

        @TRACKERS.register("swanlab")
        class SwanlabConfig(TrackerConfig): ...

    Modules are imported on first use only, so that a command can list all names quickly.
    """

    setting: str  # config key that holds the name, e.g. `tracker`
    package: str | None  # None: all implementations are in the module of the registry
    helpers: Collection[str] = ()  # modules of the package that register nothing
    _entries: dict[str, T] = field(default_factory=dict, init=False)

    def register(self, name: str) -> Callable[[Entry], Entry]:
        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise UserError(
                    f"{self.setting} {name!r} is registered twice",
                    f"{self.setting}={name}",
                    "give the plugin's entry another name",
                )
            self._entries[name] = entry  # type: ignore[assignment]  # Entry keeps the decorated class's own type
            return entry

        return add

    def remove(self, name: str) -> None:
        """Forget an entry, e.g. that of a plugin at the end of a test; nothing happens if there is none."""
        self._entries.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of all modules of the package and of all registered entries; imports nothing but the package
        and plugins.
        """
        import_inherited_plugins()
        return sorted(self._modules | self._entries.keys())

    def entries(self) -> dict[str, T]:
        """Return all entries by name; imports every module of the package."""
        return {name: self._entry(name) for name in self.names()}

    def get(self, name: str) -> T:
        """Return the entry of this name. Raises UserError if there is none."""
        check_choice(self.setting, name, self.names())
        return self._entry(name)

    @cached_property
    def _modules(self) -> set[str]:
        package = importlib.import_module(self.package) if self.package else None
        modules = pkgutil.iter_modules(getattr(package, "__path__", ()))
        return {module.name for module in modules if module.name not in self.helpers}

    def _entry(self, name: str) -> T:
        if name not in self._entries or name in self._modules:  # a plugin with the name of a module is refused
            importlib.import_module(f"{self.package}.{name}")
        return self._entries[name]


def locate_plugin(name: str) -> str:
    """Return an importable module name as it is, and a .py file or a package in the current directory as an absolute
    path.
    """
    path = Path(name).expanduser()
    if "/" not in name and path.suffix != ".py":
        if importlib.util.find_spec(name.partition(".")[0]):
            return name
        path = path if (path / "__init__.py").is_file() else Path(f"{path}.py")
    if not path.exists():
        raise UserError(
            f"plugin {name} is neither an importable module nor a file",
            f"plugins=[{name}]",
            "install the package, or give the path of a .py file",
        )
    return str(path.absolute())


def import_plugins(names: Iterable[str]) -> None:
    """Import each plugin of `locate_plugin` once, and have the child processes of this process import it."""
    for name in names:
        if name in IMPORTED_MODULES:
            continue
        try:
            IMPORTED_MODULES[name] = _import_file(Path(name)) if name.startswith("/") else importlib.import_module(name)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # a program that runs on import ends with its own exit code
            raise UserError(
                f"plugin {name} cannot be imported: {type(error).__name__}: {error}",
                f"plugins=[{name}]",
                "correct the module",
            ) from error
    if IMPORTED_MODULES:
        os.environ[PLUGINS_ENV] = json.dumps([*IMPORTED_MODULES])


def cached_with_plugins(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the results of a function of hashable arguments that depends on what plugins register, too."""
    cached = cache(lambda plugins, *args: function(*args))
    return lambda *args: cached(tuple(IMPORTED_MODULES), *args)


def import_inherited_plugins() -> None:
    """Import the plugins of the parent process, once."""
    global _inherited
    if not _inherited:
        _inherited = True
        import_plugins(json.loads(os.environ.get(PLUGINS_ENV, "[]")))


def check_imported(names: Iterable[str]) -> None:
    """Raise UserError for plugins that a config names and that were not typed for this command."""
    import_inherited_plugins()
    if missing := [name for name in names if name not in IMPORTED_MODULES]:
        typed = shlex.quote(f"plugins={json.dumps(missing, ensure_ascii=False)}")  # paths may have spaces and commas
        raise UserError(
            f"the config needs plugins that were not given: {', '.join(missing)}; modules named in a file are not imported",
            typed,
            f"add {typed} if you trust them",
        )


def plugin_files() -> dict[str, Path]:
    """Return the Python files of the imported plugins, by their path relative to the folder that holds the plugin."""
    found: dict[str, Path] = {}
    for module in IMPORTED_MODULES.values():
        file = Path(module.__file__ or "")
        if file.name == "__init__.py":
            files = sorted(path for path in file.parent.rglob("*.py") if path.is_file())[:MAX_PLUGIN_FILES]
            found |= {str(path.relative_to(file.parents[1])): path for path in files}
        elif file.suffix == ".py":
            found[file.name] = file
    return found


def _import_file(path: Path) -> ModuleType:
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path
    spec = importlib.util.spec_from_file_location(
        path.stem, file, submodule_search_locations=[str(path)] if is_package else None
    )
    if spec is None or spec.loader is None:
        raise UserError(f"plugin {path} is no Python file", f"plugins=[{path}]", "give the path of a .py file")
    if path.stem in sys.modules:
        raise UserError(
            f"plugin {path} has the name of the module {path.stem}, which is imported already",
            f"plugins=[{path}]",
            "rename the file",
        )
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
