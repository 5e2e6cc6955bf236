"""Registry of the named implementations of one extension axis: trackers, optimizers, objectives."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from common.errors import UserError, did_you_mean
from common.plugins import import_inherited_plugins

T = TypeVar("T")
Entry = TypeVar("Entry")


class Registry(Generic[T]):
    """Implementations by the name that the user types, e.g. `tracker=swanlab`.

    Each is a module of `package` with that name, or of a plugin, and registers itself when it is imported:

        TRACKERS: Registry[type[TrackerConfig]] = Registry("tracker", "runner.tracking.trackers")

        @TRACKERS.register("swanlab")
        class SwanlabConfig(TrackerConfig): ...

    Modules are imported on first use only, so that a command can list all names quickly.
    """

    def __init__(self, setting: str, package: str | None, helpers: Collection[str] = ()) -> None:
        """`package` is None if all implementations are in the module of the registry; `helpers`: modules of the package that register nothing."""
        self.setting = setting  # config key that holds the name, e.g. `tracker`
        self._package, self._helpers = package, helpers
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise UserError(f"{self.setting} {name!r} is registered twice", f"{self.setting}={name}", "give the plugin's entry another name")
            self._entries[name] = entry  # type: ignore[assignment]  # Entry keeps the decorated class's own type
            return entry

        return add

    def remove(self, name: str) -> None:
        """Forget an entry, e.g. that of a plugin at the end of a test; nothing happens if there is none."""
        self._entries.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of all modules of the package and of all registered entries; imports nothing but the package and plugins."""
        import_inherited_plugins()
        modules = pkgutil.iter_modules(importlib.import_module(self._package).__path__) if self._package else ()
        return sorted({module.name for module in modules if module.name not in self._helpers} | self._entries.keys())

    def entries(self) -> dict[str, T]:
        """Return all entries by name; imports every module of the package."""
        return {name: self.get(name) for name in self.names()}

    def get(self, name: str) -> T:
        """Return the entry of this name. Raises UserError if there is none."""
        names = self.names()
        if name not in self._entries and name in names:
            importlib.import_module(f"{self._package}.{name}")
        if name not in self._entries:
            raise UserError(
                f"{self.setting} must be one of {', '.join(names)}, got {name}",
                f"{self.setting}={name}",
                did_you_mean(name, names, f"e.g. {self.setting}={names[0]}"),
            )
        return self._entries[name]
