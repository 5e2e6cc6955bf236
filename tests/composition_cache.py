"""What a composition of Hydra parses, kept for the next composition of the same process: YAML files, overrides and
interpolations. Tests compose thousands of times, a command once or once per job.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from typing import Any

import omegaconf._utils
import omegaconf.base
from hydra._internal import defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf


def install() -> None:
    """Replace the functions of Hydra and OmegaConf that parse a text. An error is not kept, and each caller gets a copy."""
    OverridesParser.parse_rule = _returning_copies(OverridesParser.parse_rule, lambda parser, text, rule: (text, rule))
    Plugins.instance()  # registers the sources
    for scheme in ("file", "pkg"):
        source = SourcesRegistry.instance().resolve(scheme)
        source.load_config = _returning_copies(source.load_config, _version_of_file)
    create_map, no_choices = defaults_list._create_interpolation_map, OmegaConf.create()
    defaults_list._create_interpolation_map = lambda overrides, defaults, self_added: (
        create_map(overrides, defaults, self_added) if "${" in repr(defaults) else no_choices
    )
    # a tree that is only read
    omegaconf.base.parse = omegaconf._utils.parse = functools.cache(omegaconf.base.parse)


def _version_of_file(source: ConfigSource, config_path: str) -> tuple[Any, ...]:
    path = os.path.realpath(os.path.join(source.path, source._normalize_file_name(config_path)))
    status = os.stat(path) if os.path.exists(path) else None
    return path, source.path, source.provider, status and (status.st_ino, status.st_mtime_ns, status.st_size)


def _returning_copies(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[Any, bytes] = {}  # a copy of a config takes five times as long

    @functools.wraps(function)
    def cached(*arguments: Any, **named: Any) -> Any:
        if (version := key(*arguments, **named)) not in results:
            results[version] = pickle.dumps(function(*arguments, **named))
        return pickle.loads(results[version])

    return cached
