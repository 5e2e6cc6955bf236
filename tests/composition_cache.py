"""What a composition of Hydra parses and merges, kept for the next composition of the same process: YAML files,
overrides, interpolations, defaults lists and the config of the same files. Tests compose thousands of times, a command
once or once per job.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import omegaconf._utils
import omegaconf.base
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf


def install() -> None:
    """Replace the functions of Hydra and OmegaConf that parse a text, or read files only. An error is not kept, and each
    caller gets a copy.
    """
    OverridesParser.parse_rule = _returning_copies(OverridesParser.parse_rule, lambda parser, text, rule: (text, rule))
    Plugins.instance()  # registers the sources
    for scheme in ("file", "pkg"):
        source = SourcesRegistry.instance().resolve(scheme)
        source.load_config = _returning_copies(source.load_config, _version_of_file)
    OmegaConf.load = staticmethod(_loading_texts_once(OmegaConf.load))
    # each composition copies the list of sources, one of which refers to it
    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]  # added here
    create_map, no_choices = defaults_list._create_interpolation_map, OmegaConf.create()
    defaults_list._create_interpolation_map = lambda overrides, defaults, self_added: (
        create_map(overrides, defaults, self_added) if "${" in repr(defaults) else no_choices
    )
    defaults_list._create_defaults_list = _returning_choices(defaults_list._create_defaults_list)
    ConfigLoaderImpl._compose_config_from_defaults_list = _returning_copies(
        ConfigLoaderImpl._compose_config_from_defaults_list,
        lambda loader, defaults, repo: (str(defaults), _state(repo)),
    )
    OmegaConf.structured = staticmethod(
        _returning_copies(OmegaConf.structured, lambda cls, *_, **flags: isinstance(cls, type) and (cls, str(flags)))
    )
    # a tree that is only read
    omegaconf.base.parse = omegaconf._utils.parse = functools.cache(omegaconf.base.parse)


def _version_of_file(source: ConfigSource, config_path: str) -> tuple[Any, ...]:
    path = os.path.realpath(os.path.join(source.path, source._normalize_file_name(config_path)))
    status = os.stat(path) if os.path.exists(path) else None
    return path, source.path, source.provider, status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _state(repo: Any) -> tuple[Any, ...]:
    """Return what decides the configs of a repository: the versions of the files in its folders, and what is stored."""
    if (state := vars(repo).get("state")) is None:
        sources = [(source.provider, source.scheme(), source.path) for source in repo.get_sources()]
        folders = [path for _, scheme, path in sources if scheme == "file"]
        versions = [version for folder in folders for version in _versions_in(folder)]
        repo.state = state = (str(sources), *versions, *_stored_nodes(ConfigStore.instance().repo))
    return state


def _versions_in(folder: str) -> list[tuple[Any, ...]]:
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    versions: list[tuple[Any, ...]] = []
    for entry in entries:
        if entry.is_dir():
            versions += [(entry.path,), *_versions_in(entry.path)]
        elif entry.name.endswith((".yaml", ".yml")):
            status = entry.stat()
            versions.append((entry.path, status.st_ino, status.st_mtime_ns, status.st_size))
    return versions


class _Identity:
    """A node of the store as a part of a key: equal to itself only, and alive as long as the key."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def __hash__(self) -> int:
        return id(self.node)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.node is other.node


def _stored_nodes(stored: dict[str, Any]) -> list[Any]:
    nodes: list[Any] = []
    for name, entry in stored.items():
        nodes += [name, *(_stored_nodes(entry) if isinstance(entry, dict) else [_Identity(entry.node)])]
    return nodes


def _loading_texts_once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `OmegaConf.load`, which copies of conf/ are read with, too. An error names its file."""
    parsed = _returning_copies(lambda text: load(io.StringIO(text)), lambda text: text)

    def load_once(file: Any) -> Any:
        if not hasattr(file, "read"):
            return load(file)
        try:
            return parsed(file.read())
        except (yaml.YAMLError, OSError):  # OSError: not a mapping
            file.seek(0)
            return load(file)

    return load_once


def _returning_choices(create: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `_create_defaults_list`, which writes into its argument `overrides` what it has chosen; it does not read
    the overrides of values.
    """

    def created(repo: Any, config_name: str, overrides: Any, **named: Any) -> Any:
        return create(repo, config_name, overrides, **named), vars(overrides)

    cached = _returning_copies(
        created, lambda repo, name, overrides, **named: (name, str(overrides), str(named), _state(repo))
    )

    def create_defaults_list(repo: Any, config_name: str, overrides: Any, **named: Any) -> Any:
        of_values, overrides.config_overrides = overrides.config_overrides, []
        result, choices = cached(repo, config_name, overrides, **named)
        vars(overrides).update(choices, config_overrides=of_values)
        return result

    return create_defaults_list


CLASSES: dict[int, type] = {}


class _Pickler(pickle.Pickler):
    """Pickles classes as their id in `CLASSES`: some have been made by a function."""

    def persistent_id(self, value: Any) -> int | None:
        return CLASSES.setdefault(id(value), value) and id(value) if isinstance(value, type) else None


class _Unpickler(pickle.Unpickler):
    persistent_load = CLASSES.__getitem__


def _returning_copies(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Keep each result of `function` for its `key`; where that is False, nothing."""
    results: dict[Any, bytes] = {}  # a copy of a config takes five times as long

    @functools.wraps(function)
    def cached(*arguments: Any, **named: Any) -> Any:
        version = key(*arguments, **named)
        if version is False:
            return function(*arguments, **named)
        if version not in results:
            buffer = io.BytesIO()
            _Pickler(buffer).dump(function(*arguments, **named))
            results[version] = buffer.getvalue()
        return _Unpickler(io.BytesIO(results[version])).load()

    return cached
