"""Translates errors of Hydra and OmegaConf into UserError."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from common.errors import UserError, did_you_mean
from runner.config import overrides, schema, yaml_files
from runner.engine.config import REGISTERED_SECTIONS

OPTIONAL_SECTIONS = {  # null unless a stage or a model file sets them -> what sets them
    "stage.lora": "stage=lora or stage=dpo_lora trains adapters, and sets stage.lora",
    "model.rope_scaling": "set rope_scaling with all its keys in a YAML file of the group model",
}
EXPECTED = {
    "int": "an integer, e.g. 100",
    "float": "a number, e.g. 5e-4",
    "bool": "true or false",
    "list": "a list in brackets, e.g. [0.9,0.95]",
}
OMEGACONF_TYPES = {"Integer": "int", "Float": "float", "Boolean": "bool"}  # in its messages
# from Hydra's override grammar
SYNTAX_ERRORS = ("mismatched input", "extraneous input", "no viable alternative", "token recognition error")
HELP_HINT = "--help lists the settings, --hydra-help those of Hydra"


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
        raise yaml_files.with_position(translated, typed) if names_files else translated from cause
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{mark.name.strip()}:{mark.line + 1}:{mark.column + 1}" if mark else "a YAML file of the config"
        raise UserError(
            f"invalid YAML: {getattr(error, 'problem', None) or error}",
            position.replace('"', "").replace("in ", ""),
            "correct the file",
        ) from error
    # omegaconf 2.3, for an override of a key inside a section that is null
    except (AttributeError, AssertionError) as error:
        names = tuple(f"{name}." for name in OPTIONAL_SECTIONS)
        inside = next((override for override in typed if f"{overrides.key_of(override)}.".startswith(names)), None)
        if inside is None:
            raise
        raise null_section_error(inside) from error


def null_section_error(override: str) -> UserError:
    key = overrides.key_of(override)
    section = next(section for section in OPTIONAL_SECTIONS if key.startswith(section))
    return UserError(f"{section} is null here, its keys cannot be set one by one", override, OPTIONAL_SECTIONS[section])


def translate_hydra_error(error: BaseException, typed: list[str]) -> UserError:
    """Return `error` as a UserError that names the override of `typed` it is about, or the entry of a defaults list."""
    causes = (error.__cause__, error, error.__context__)  # Hydra raises its own error about one of OmegaConf
    cause = next((cause for cause in causes if isinstance(cause, OmegaConfBaseException) and cause.full_key), error)
    key = (getattr(cause, "full_key", None) or "").partition("[")[0]
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    same_key = [override for override in typed if override.lstrip("+").startswith(f"{key}=")]
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
        return UserError(
            f"this override cannot be parsed: {message}",
            getattr(error, "override", override),
            "quote a value that has brackets, commas, spaces or = in it: 'key=\"value\"'",
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
    got = f", got {'null' if value == 'None' else value}" if value else ""
    return UserError(
        f"{key} must be {name}{got}",
        override,
        f"{key}={example.removeprefix('e.g. ')}" if example else f"{key}=true or {key}=false",
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
        position = position or yaml_files.default_position(
            error.missing_cfg_file, dirs, [file[1] if file else "", *chosen]
        )
        options = list(error.options or groups.get(group) or ())
        return schema.unknown_option(group, name, position or error.missing_cfg_file, options)
    if unknown := re.search(r"Could not override '([^']*)'", message):
        key = unknown[1].partition("@")[0]
        if override := next((override for override in typed if overrides.key_of(override) == key), None):
            return UserError(f"{key} is not in the defaults list of the config", override, f"+{override} adds it")
        hint = did_you_mean(key, groups, f"the groups are {', '.join(groups)}")
        return UserError(
            f"a defaults list overrides {key}, which is not in the config",
            yaml_files.default_position(key, dirs) or key,
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
            return UserError(f"{section} has no key {name} yet; + adds one", override, f"+{override}")
        return UserError(
            f"unknown setting {key}",
            override,
            did_you_mean(name, known, f"{section} has {', '.join(known)}" if known else HELP_HINT),
        )
    if isinstance(cause, ConfigKeyError) and key not in schema.config_schema():
        return UserError(f"unknown setting {key}", key, overrides.nearest_key(key))
    section = key.rpartition(".")[0]
    if section in OPTIONAL_SECTIONS:
        return null_section_error(override)
    if (
        section in REGISTERED_SECTIONS
        and isinstance(cause.parent_node, DictConfig)
        and (chosen := cause.parent_node.get(REGISTERED_SECTIONS[section][0]))
    ):
        return schema.unread_setting(key, chosen)
    return None
