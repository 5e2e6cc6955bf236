"""Translates errors of Hydra and OmegaConf into UserError."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from common.errors import UserError
from runner.config import overrides, schema
from runner.engine.config import REGISTERED_SECTIONS

OPTIONAL_SECTIONS = ("model.rope_scaling", "stage.lora")  # null unless a stage or a model file sets them
EXPECTED = {"int": "an integer, e.g. 100", "float": "a number, e.g. 5e-4", "bool": "true or false", "list": "a list in brackets, e.g. [0.9,0.95]"}
SYNTAX_ERRORS = ("mismatched input", "extraneous input", "no viable alternative", "token recognition error")  # from Hydra's override grammar
HELP_HINT = "--help lists the settings, --hydra-help those of Hydra"


@contextmanager
def translating_hydra_errors(typed: list[str]) -> Iterator[None]:
    """Raise UserError for an error of Hydra or OmegaConf about one of the `typed` overrides."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise translate_hydra_error(error, typed) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"{mark.name.strip()}:{mark.line + 1}:{mark.column + 1}" if mark else "a YAML file of the config"
        raise UserError(
            f"invalid YAML: {getattr(error, 'problem', None) or error}", position.replace('"', "").replace("in ", ""), "correct the file"
        ) from error
    except (AttributeError, AssertionError) as error:  # omegaconf 2.3, for an override of a key inside a section that is null
        inside = next((override for override in typed for name in OPTIONAL_SECTIONS if re.match(rf"\+*{name}[.=]", override)), None)
        if inside is None:
            raise
        raise null_section_error(inside) from error


def null_section_error(override: str) -> UserError:
    section = override.lstrip("+").partition("=")[0].rpartition(".")[0]
    fix = "stage=lora or stage=dpo_lora sets stage.lora; set model.rope_scaling in a YAML file of the group model"
    return UserError(f"{section} is null here, its keys cannot be set one by one", override, fix)


def translate_hydra_error(error: BaseException, typed: list[str]) -> UserError:
    """Return `error` as a UserError that names the override of `typed` it is about."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = (getattr(cause, "full_key", None) or "").partition("[")[0]
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if message.endswith("composing config:"):  # the cause is in the lines below
        message = " ".join(lines[:3])
    same_key = [override for override in typed if override.lstrip("+").startswith(f"{key}=")]
    # of a key that is given twice, the override whose value is in the message; otherwise the last one, which counts
    quoted = next((override for override in same_key if f"'{override.partition('=')[2]}'" in message), None)
    override = quoted or (same_key or [key or " ".join(typed) or "the command line"])[-1]
    kind = schema.config_schema().get(key)
    if isinstance(cause, ConfigKeyError) and key not in schema.config_schema():
        return UserError(f"unknown setting {key}", key, overrides.nearest_key(key))
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        section = key.rpartition(".")[0]
        if section in OPTIONAL_SECTIONS:
            return null_section_error(override)
        if section in REGISTERED_SECTIONS and (chosen := cause.parent_node.get(REGISTERED_SECTIONS[section][0])):
            return schema.unread_setting(key, chosen)
    if message.startswith(("Ambiguous value", "Sweep parameters")):  # 1,2 and range(1,2)
        values = re.search(r"'(.*)'", message)
        return UserError("several values for one run", values[1] if values else override, "add --multirun to train once with each; a list is written [1,2]")
    if dataclasses.is_dataclass(kind):
        return UserError(f"{key} is a section; its keys are set one by one", override, f"e.g. {key}.{dataclasses.fields(kind)[0].name}=<value>")
    if isinstance(error, OverrideParseException) or message.startswith(SYNTAX_ERRORS):
        return UserError(
            f"this override cannot be parsed: {message}",
            getattr(error, "override", override),
            "quote a value that has brackets, commas, spaces or = in it: 'key=\"value\"'",
        )
    expected = EXPECTED.get(getattr(kind, "__name__", ""))
    if expected is None:
        return UserError(message, override, HELP_HINT)
    name, _, example = expected.partition(", ")
    return UserError(f"{key} must be {name}", override, f"{key}={example.removeprefix('e.g. ')}" if example else f"{key}=true or {key}=false")
