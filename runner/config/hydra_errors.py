"""Translates errors of Hydra and OmegaConf into UserError, with the line that sets the setting in the YAML files that
the overrides are composed from; these files also for the copies in a run directory.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import hydra
import yaml
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from common.errors import UserError, did_you_mean
from common.paths import CONF_DIR, REPO_ROOT
from runner.config import overrides, schema

DECIMAL = re.compile(r"(\d{1,15}\.?\d{0,15}|\.\d{1,15})(e\+?\d)?")
SETTING = re.compile(r"[a-z]\w*(\.\w+)*")
# 1.3 warns without it, 1.4 with it
HYDRA_VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
OPTIONAL_SECTIONS = {  # null unless a stage or a model file sets them -> what sets them
    "stage.lora": "stage=lora or stage=dpo_lora trains adapters, and sets stage.lora",
    "model.rope_scaling": "set rope_scaling with all its keys in a YAML file of the group model",
}
EXPECTED = {
    "int": "an integer, e.g. {integer}",
    "float": "a number, e.g. 5e-4",
    "bool": "true or false",
    "list": "a list in brackets, e.g. [{value}]",
}
OMEGACONF_TYPES = {"Integer": "int", "Float": "float", "Boolean": "bool"}  # in its messages
# from Hydra's override grammar
SYNTAX_ERRORS = ("mismatched input", "extraneous input", "no viable alternative", "token recognition error")
HELP_HINT = "--help lists the settings, --hydra-help those of Hydra"


@contextmanager
def composing_from(conf: Path) -> Iterator[Hydra]:
    """Initialise Hydra with the config folder `conf`, also inside a run or sweep where it is initialised already."""
    current = GlobalHydra.instance()
    before, current.hydra = current.hydra, None
    try:
        with initialize_config_dir(str(conf), "train", **HYDRA_VERSION_BASE):
            assert current.hydra is not None
            yield current.hydra
    finally:
        current.hydra = before


def composed_files(typed: Sequence[str], conf: Path = CONF_DIR) -> list[tuple[Path, str, list[str]]]:
    """Return (file, its name in a config folder, its package) for each YAML file that the overrides are composed from,
    in this order.

    Files of Hydra's own config are left out. The options without a file must be registered (`register_configs`).
    """
    with composing_from(conf) as hydra:
        values = overrides.normalize_values(typed)
        defaults = hydra.config_loader.compute_defaults_list("config", values, RunMode.RUN).defaults
    dirs, files = overrides.config_dirs(list(typed), conf), []
    for default in defaults:
        name = f"{default.config_path}.yaml"
        path = next((folder / name for folder in dirs if (folder / name).is_file()), None)
        if path is not None and not name.startswith("hydra/"):
            files.append((path, name, [part for part in (default.package or "").split(".") if part]))
    return files


def with_position(error: UserError, typed: Sequence[str]) -> UserError:
    """Return `error` with the file and line that sets its setting, if none of the `typed` overrides is about it and a
    YAML file does.
    """
    key, _, value = error.setting.partition(" ")[0].partition("=")
    named = {overrides.key_of(part) for part in error.setting.split(" ")}  # a setting may consist of several overrides
    if named & {overrides.key_of(override) for override in typed} or not SETTING.fullmatch(key):
        return error
    position = setting_position(key, value, typed)
    return type(error)(error.message, f"{position}: {error.setting}", error.fix) if position else error


def setting_position(key: str, value: str, typed: Sequence[str]) -> str | None:
    """Return file:line of the last file that sets `key`, to something else than ???.

    For a key that no file sets and that has no `value`, return the file of the user that should: the last one of its
    section.
    """
    section_file = None
    try:
        files = composed_files(typed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):  # the defaults lists are wrong
        return None
    for path, _, package in reversed(files):
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        parts = key.split(".")
        if parts[: len(package)] != package:
            continue
        if (found := _find(node, parts[len(package) :])) is not None:
            key_node, value_node = found
            return None if value_node.value == "???" else _position(path, key_node.start_mark.line + 1)
        if section_file is None and package and CONF_DIR not in path.parents:
            section_file = path
    return str(path_in_checkout(section_file)) if section_file and not value else None


def default_position(option: str, dirs: Sequence[Path], first: Sequence[str] = ()) -> str | None:
    """Return file:line of the entry of a defaults list that names the config `option`, e.g. model/tinyy or tinyy; the
    files `first` are read first.
    """
    group, _, name = option.rpartition("/")
    for folder in reversed(dirs):
        for path in sorted(
            folder.rglob("*.yaml"), key=lambda path: str(path.relative_to(folder))[: -len(".yaml")] not in first
        ):
            with suppress(yaml.YAMLError, OSError, UnicodeDecodeError):
                if line := next(
                    (line for key, value, line in _defaults_entries(path) if _is_entry(key, value, group, name)), None
                ):
                    return _position(path, line)
    return None


def ineffective_override(group: str, chosen: str, typed: Sequence[str]) -> tuple[str, str] | None:
    """Return (option, file:line) of a file of the user that overrides `group` with another option than `chosen`:
    conf/config.yaml has precedence.
    """
    for path, _, _ in composed_files(typed):
        for key, value, line in _defaults_entries(path) if CONF_DIR not in path.parents else ():
            if key.removeprefix("override ").strip("/ ") == group and value != chosen:
                return value, _position(path, line)
    return None


def _defaults_entries(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (group, option, line) of the entries of a defaults list; an entry without a group has an empty one."""
    found = _find(yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), ["defaults"])
    for entry in found[1].value if found and isinstance(found[1], yaml.SequenceNode) else ():
        pairs = (
            [(key.value, value) for key, value in entry.value] if isinstance(entry, yaml.MappingNode) else [("", entry)]
        )
        yield from ((key, str(value.value), value.start_mark.line + 1) for key, value in pairs)


def _is_entry(key: str, value: str, group: str, name: str) -> bool:
    if not key:  # `- tinyy` in a file of the group model, or `- /model/tinyy`
        return value.partition("@")[0].rpartition("/")[2] == name
    entry_group = key.removeprefix("override ").removeprefix("optional ").partition("@")[0].strip("/")
    return (
        value == name
        and (entry_group == group or not group)
        or (not value and entry_group == name)
        or entry_group == f"{group}/{name}".strip("/")
    )


def _find(node: yaml.Node | None, parts: Sequence[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """Return the nodes of the key and the value at the path `parts` of a mapping; also where a key is written with
    dots.
    """
    if not isinstance(node, yaml.MappingNode):
        return None
    for key, value in node.value:
        if key.value == ".".join(parts):
            return key, value
        if [key.value] == parts[:1] and (found := _find(value, parts[1:])):
            return found
    return None


def _position(path: Path, line: int) -> str:
    return f"{path_in_checkout(path)}:{line}"


def path_in_checkout(path: Path) -> Path:
    return path.relative_to(REPO_ROOT) if CONF_DIR in path.parents else path


@contextmanager
def translating_hydra_errors(typed: list[str], names_files: bool = True) -> Iterator[None]:
    """Raise UserError for an error of Hydra or OmegaConf about one of the `typed` overrides, or about a YAML file that
    they select.

    `names_files`: add file and line to an error of a setting that a YAML file sets. False where the values are those of
    a run directory.
    """
    try:
        yield
    except (UserError, HydraException, OmegaConfBaseException) as error:
        translated = error if isinstance(error, UserError) else translate_hydra_error(error, typed)
        cause = error.__cause__ if translated is error else error
        raise with_position(translated, typed) if names_files else translated from cause
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{mark.name.strip()}:{mark.line + 1}:{mark.column + 1}" if mark else "a YAML file of the config"
        raise UserError(
            f"invalid YAML: {getattr(error, 'problem', None) or error}",
            position.replace('"', "").replace("in ", ""),
            "correct the file",
        ) from error


def translate_hydra_error(error: BaseException, typed: list[str]) -> UserError:
    """Return `error` as a UserError that names the override of `typed` it is about, or the entry of a defaults list."""
    causes = (error.__cause__, error, error.__context__)  # Hydra raises its own error about one of OmegaConf
    cause = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), error)
    key = (getattr(cause, "full_key", None) or "").partition("[")[0]
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    keys = [f"{key}=", f"{key.rpartition('.')[0]}={{"]  # {NAME: value} of a dict
    if key.startswith("hydra."):
        keys.append(f"{key}.")  # a key of a dict in it
    same_key = [override for override in typed if override.lstrip("+").startswith(tuple(keys))]
    # of a key that is given twice, the override whose value is in the message; otherwise the last one, which counts
    quoted = next((override for override in same_key if f"'{override.partition('=')[2]}'" in message), None)
    override = quoted or (same_key or [key or " ".join(typed) or "the command line"])[-1]
    if error_of_defaults := _defaults_error(error, message, typed):
        return error_of_defaults
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and (
        unknown := _unknown_key_error(cause, key, override)
    ):
        return unknown
    if message.startswith(("Ambiguous value", "Sweep parameters")):  # 1,2 and range(1,2)
        values = re.search(r"'(.*)'", message)
        return UserError(
            "several values for one run",
            values[1] if values else override,
            "add --multirun to train once with each; a list is written [1,2]",
        )
    if variable := re.search("Environment variable '(.*)' not found", message):
        return UserError(f"{key}: {variable[0]}", override, f"export {variable[1]}=<value>")
    kind = schema.config_schema().get(key)
    if key == "run" and "=" in override:  # run=DIR of the commands that read a run
        name = override.partition("=")[2]
        fix = f"resume={name} means that run: train.py continues it, plan.py plans what is left of it, or more with train.max_steps=N; run.name=NAME only labels a new one"
        return UserError("run is a section of the settings of a training, not a run directory", override, fix)
    if dataclasses.is_dataclass(kind):
        return UserError(
            f"{key} is a section; its keys are set one by one",
            override,
            f"e.g. {key}.{dataclasses.fields(kind)[0].name}=<value>",
        )
    if isinstance(error, OverrideParseException) or message.startswith(SYNTAX_ERRORS):
        override = getattr(error, "override", override)
        return UserError(
            f"this override cannot be parsed: {message}",
            override,
            "remove the comma at the end"
            if override.endswith(",")
            else "quote a value that has brackets, commas, spaces or = in it: 'key=\"value\"'",
        )
    return value_error(key, getattr(kind, "__name__", ""), message, override) or UserError(message, override, HELP_HINT)


def value_error(key: str, kind: str, message: str, override: str) -> UserError | None:
    """Return the error for a value of the wrong type, from OmegaConf's `message`; None if the type is not in EXPECTED.
    `kind`: name of the type.
    """
    converted = re.search(r"could not be converted to (\w+)", message)
    if not key:
        return None
    expected = EXPECTED.get(kind) or EXPECTED.get(OMEGACONF_TYPES.get(converted[1], "") if converted else "")
    if expected is None:
        return None
    given = re.search(r"[Vv]alue '(.*?)'", message)
    value = override.partition("=")[2] if "=" in override else given[1] if given else ""
    name, _, example = expected.partition(", ")
    items = "" if value == "null" else re.sub(r"[\s,]+", ",", value.strip("\"'"))
    integer = str(math.ceil(float(value))) if DECIMAL.fullmatch(value) else "100"
    suggested = example.removeprefix("e.g. ").replace("{value}", items).replace("{integer}", integer)
    got = f", got {'null' if value == 'None' else value}" if value else ""
    return UserError(
        f"{key} must be {name}{got}",
        override,
        f"{key}={suggested}" if example else f"{key}=true or {key}=false",
    )


def _defaults_error(error: BaseException, message: str, typed: list[str]) -> UserError | None:
    """Return the error for an entry of a defaults list that names no option or no group, None for other errors."""
    dirs = overrides.config_dirs(typed)
    groups = schema.config_groups(*dirs)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        file = re.match("In '([^']*)'", message)
        position = next((override for override in typed if override.lstrip("+") == f"{group}={name}"), None)
        chosen = [override.lstrip("+").replace("=", "/") for override in typed]
        position = position or default_position(error.missing_cfg_file, dirs, [file[1] if file else "", *chosen])
        options = list(error.options or groups.get(group) or ())
        return schema.unknown_option(group, name, position or error.missing_cfg_file, options)
    if unknown := re.search(r"Could not override '([^']*)'", message):
        key = unknown[1].partition("@")[0]
        if override := next((override for override in typed if overrides.key_of(override) == key), None):
            return UserError(f"{key} is not in the defaults list of the config", override, f"+{override} adds it")
        hint = did_you_mean(key, groups, f"the groups are {', '.join(groups)}")
        return UserError(
            f"a defaults list overrides {key}, which is not in the config",
            default_position(key, dirs) or key,
            hint,
        )
    return None


def _unknown_key_error(cause: ConfigKeyError | ConfigAttributeError, key: str, override: str) -> UserError | None:
    """Return the error for a setting that does not exist; None if it exists in another place."""
    if key.partition(".")[0] == "experiment":
        fix = "begin the file with the line `# @package _global_`, and let it hold settings (train: {epochs: 3})"
        return UserError("an experiment file sets the section experiment, which does not exist", "experiment", fix)
    if key.startswith("hydra."):
        section, _, name = key.rpartition(".")
        known = [str(option) for option in cause.parent_node] if isinstance(cause.parent_node, DictConfig) else []
        if "not in struct" in str(cause):  # a dict, which takes any key
            return UserError(f"{section} has no key {name} yet; + adds one", override, shlex.quote(f"+{override}"))
        return UserError(
            f"unknown setting {key}",
            override,
            did_you_mean(name, known, f"{section} has {', '.join(known)}" if known else HELP_HINT),
        )
    if key.startswith("hydra/"):
        return UserError(f"there is no config group {key}", override, "--config-dir=DIR names the folder that has it")
    if isinstance(cause, ConfigKeyError) and key not in schema.config_schema():
        return UserError(f"unknown setting {key}", key, overrides.nearest_key(key))
    return None
