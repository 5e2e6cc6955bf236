"""Overrides (`key=value`, `group=option`) as the user types them: checked against the schema and normalised before anything is composed."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR
from common.plugins import locate_plugin
from runner.config.schema import config_groups, config_schema

HYDRA_PREFIXES = ("hydra.", "hydra/")
RUN_DIR_CALLBACK = "hydra.callbacks.run_dir creates and locks the run directory"
HYDRA_KEYS_REFUSED = {
    "hydra.output_subdir": "a run is resumed from its .hydra/",
    "hydra.mode": "--multirun starts a sweep",
    **dict.fromkeys(("hydra/callbacks", "hydra.callbacks", "hydra.callbacks.run_dir"), RUN_DIR_CALLBACK),
}
PATH_KEYS = ("data.path", "data.val_path", "data.tokenizer", "init_from")  # made absolute: a run may be resumed from another directory
SEARCHPATH_KEY, PLUGINS_KEY = "hydra.searchpath", "plugins"
INTEGER_WITH_EXPONENT = re.compile(r"\d+(\.\d+)?e\+?\d+")  # 1e3
RENAMED_SETTINGS = {  # former key, or key=value, and what replaces it
    "stage.rows": "stage.data_format",
    "stage.after": "stage.init_from_stage",
    "stage.prompts": "train.sample_prompts",
    "sweep.fix": "sweep.match_budget",
    "data.train_on": "data.loss_on",
    "data.shape": "data.schema",
    "data.packing=pack": "data.packing=best_fit",
    "train.activation_checkpointing=whole": "train.activation_checkpointing=full",
    "train.activation_checkpointing=true": "train.activation_checkpointing=full",
    "train.activation_checkpointing=false": "train.activation_checkpointing=none",
}


def key_of(override: str) -> str:
    """Return the key of an override, without the `+` or `~` before it."""
    return override.lstrip("+~").partition("=")[0]


def is_hydra_override(override: str) -> bool:
    """Return whether an override configures Hydra and not the run."""
    return override.lstrip("+~").startswith(HYDRA_PREFIXES)


def normalize_int(override: str) -> str:
    """Return `train.max_steps=1e3` as `train.max_steps=1000`: Hydra parses 1e3 as a float and refuses it for an integer."""
    key, equals, value = override.partition("=")
    if config_schema().get(key) is not int:
        return override
    values = [str(int(float(part))) if INTEGER_WITH_EXPONENT.fullmatch(part) and float(part).is_integer() else part for part in value.split(",")]
    return key + equals + ",".join(values)


def canonical_value(key: str, value: str) -> object:
    """Return an object that is equal for two spellings of one value: 0 and 0.0 of a number, 1 and 01 of an integer."""
    kind = config_schema().get(key)
    try:
        return kind(value) if kind in (int, float) else value
    except ValueError:  # refused by the composition
        return value


def check_overrides(typed: list[str], conf: Path = CONF_DIR) -> None:
    """Raise UserError for an override that no setting reads. Hydra accepts `+train.typo=1` silently."""
    groups = config_groups(*config_dirs(typed, conf))
    for override in typed:
        if "=" not in override:
            if override.startswith("~"):
                raise UserError("a setting cannot be deleted", override, f"set it to another value, e.g. {key_of(override)}=null")
            raise UserError("an override is written key=value", override, f"{override}=<value>; --help lists the settings")
        key, value = key_of(override), override.partition("=")[2]
        if key in HYDRA_KEYS_REFUSED:
            raise UserError(
                f"{key} cannot be set: {HYDRA_KEYS_REFUSED[key]}",
                override,
                "leave the override out" if "callbacks" not in key else "+hydra.callbacks.NAME._target_=... adds another",
            )
        if key in ("hydra.run.dir", "hydra.sweep.dir") and not value:
            raise UserError(f"{key} must be a directory", override, f"{key}=DIR, or leave the override out")
        if is_hydra_override(override):
            continue
        check_not_renamed(key, value)
        if key in groups:
            _check_options(key, value, groups[key])
        elif key not in config_schema():
            raise UserError(f"unknown setting {key}", key, nearest_key(key))
        elif override.startswith("+"):
            raise UserError(f"{key} exists, an override of it has no +", override, override.lstrip("+"))


def check_not_renamed(key: str, value: str) -> None:
    """Raise UserError with the new name for a setting, or a value, that had another name in an earlier version."""
    for part in (key, *(f"{key}={part}" for part in value.split(","))):
        if new := RENAMED_SETTINGS.get(part):
            raise UserError(f"{part} is now called {new}", f"{key}={value}", new if "=" in new else f"{new}={value}")


def _check_options(group: str, value: str, options: list[str]) -> None:
    for option in value.split(","):
        if option.strip() not in options and not (group == "experiment" and option == "null") and "(" not in value:
            hint = did_you_mean(option, options, "")
            raise UserError(f"{group} has no option {option}", f"{group}={option}", f"{hint} the options are {', '.join(options)}".strip())


def nearest_key(key: str) -> str:
    """Return a hint with the known key that has the same last part (lr: optimizer.lr), otherwise the one spelled most similarly."""
    last = key.rsplit(".", 1)[-1]
    same = [known for known in config_schema() if known.rsplit(".", 1)[-1] == last]
    if same:
        return f"did you mean {same[0]}?"
    return did_you_mean(key, [*config_schema(), *config_groups()], "--help lists the settings, --cfg=job all of them with their values")


def add_config_dir(typed: list[str], folder: str | None) -> list[str]:
    """Return the overrides with the folder of `--config-dir` in hydra.searchpath, whose folders become absolute `file://` URLs."""
    if folder is None and not any(key_of(override) == SEARCHPATH_KEY for override in typed):
        return typed
    urls = [_config_dir_url(url) for url in [*([folder] if folder else []), *_searchpath(typed)]]
    return [*(override for override in typed if key_of(override) != SEARCHPATH_KEY), f"{SEARCHPATH_KEY}=[{','.join(map(hydra_quote, urls))}]"]


def config_dirs(typed: list[str], conf: Path = CONF_DIR) -> list[Path]:
    """Return the folders that hold config groups, in Hydra's order: `conf` and those of hydra.searchpath."""
    dirs = [conf]
    for url in _searchpath(typed):
        scheme, _, location = url.rpartition("://")
        if scheme == "pkg":
            package, *parts = location.split("/")
            spec = importlib.util.find_spec(package)
            dirs += [Path(root, *parts) for root in spec.submodule_search_locations or ()] if spec else []
        else:
            dirs.append(Path(location))
    return [folder for folder in dirs if folder.is_dir()]


def _searchpath(typed: list[str]) -> list[str]:
    given = [override for override in typed if key_of(override) == SEARCHPATH_KEY]
    value = _parse_value(given[-1]) if given else []
    return [str(getattr(url, "text", url)) for url in (value if isinstance(value, list) else [value])]


def _config_dir_url(name: str) -> str:
    if name.startswith("pkg://"):
        return name
    folder = Path(name.removeprefix("file://")).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(
            f"the folder of config groups {name} does not exist", f"{SEARCHPATH_KEY}=[{name}]", "--config-dir=DIR, where DIR holds e.g. model/mine.yaml"
        )
    return f"file://{folder}"


def plugins_of(typed: list[str]) -> list[str]:
    """Return the plugins that the overrides name, as `locate_plugin` does."""
    given = [override for override in typed if key_of(override) == PLUGINS_KEY]
    value = _parse_value(given[-1]) if given else []
    if not isinstance(value, list):
        raise UserError("plugins must be a list", given[-1], f"plugins=[{value}]")
    return [locate_plugin(str(getattr(name, "text", name))) for name in value]


def absolutize_path(override: str) -> str:
    """Return the override with absolute paths, so that it means the same wherever the run is resumed."""
    key, _, value = override.partition("=")
    if key == PLUGINS_KEY:
        return f"{PLUGINS_KEY}=[{','.join(map(_quote_if_needed, plugins_of([override])))}]"
    if key not in PATH_KEYS:
        return override
    if value.startswith("[") or ("," in value and not os.path.exists(value)) or value.startswith("choice("):
        return f"{key}={_absolutize_items(_parse_value(override))}"
    path = _absolute_path(value)
    return override if path == value and not os.path.exists(value) else f"{key}={_quote_if_needed(path)}"


def _absolutize_items(value: Any) -> str:
    """Return a list, the values of a sweep, or one path, as the value of an override."""
    if isinstance(value, list):
        return f"[{','.join(map(_absolutize_items, value))}]"
    if hasattr(value, "list"):
        return ",".join(map(_absolutize_items, value.list))
    if isinstance(value, str) and value.startswith("${"):
        return value
    return "null" if value is None else _quote_if_needed(_absolute_path(str(getattr(value, "text", value))))


def _quote_if_needed(path: str) -> str:
    return path if re.fullmatch(r"[\w./:@+-]+", path) else hydra_quote(path)


def _absolute_path(path: str) -> str:
    """Return an existing path, or a pattern in an existing folder, as absolute; anything else as it is."""
    if path.startswith(("/", "$", "~", "'", '"')):
        return path
    is_pattern = any(sign in path for sign in "*?") and os.path.isdir(os.path.dirname(path) or ".")
    return os.path.abspath(path) if is_pattern or os.path.exists(path) else path


def _parse_value(override: str) -> Any:
    """Return the value of an override as Hydra parses it: a list, the values of a sweep, a string."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        raise UserError("this list cannot be parsed", override, "quote what holds commas, spaces or brackets: 'key=[\"a, b\",c]'") from error


def hydra_quote(value: str) -> str:
    """Return a quoted string of Hydra's grammar whose value is `value`. Backslashes are doubled only before a special character."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", value) + "'"
