"""FIXME runner.config.hydra_errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from common.errors import UserError
from runner.config import overrides, schema


class translating_hydra_errors:
    """Hydra's and OmegaConf's complaints as refusals: what, where, fix."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, HydraException | OmegaConfBaseException):
            raise self.refusal(error) from error
        # omegaconf 2.3 stumbles over a word inside a section that is null
        section = next((word for word in self.words for name in OPTIONAL if re.match(rf"\+*{name}[.=]", word)), None)
        if isinstance(error, AttributeError | AssertionError) and section:
            raise UserError(
                "this section is null here, its words cannot be set one by one",
                section,
                "stage.lora: choose stage=lora or stage=dpo_lora; model.rope_scaling: write it into a file of conf/model",
            ) from error

    def refusal(self, error: BaseException) -> ValueError:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key = (getattr(cause, "full_key", None) or "").partition("[")[0]
        what = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(error).__name__)
        said = [word for word in self.words if word.lstrip("+").startswith(f"{key}=")]
        # said twice, the value that is complained of is meant; where none is, the last counts
        word = next((word for word in said if f"'{word.partition('=')[2]}'" in what), (said or [key or " ".join(self.words) or "the command line"])[-1])
        kind = schema.config_schema().get(key)
        if isinstance(cause, ConfigKeyError) and key not in schema.config_schema():
            return UserError("no such word", key, overrides.nearest_key(key))
        if what.startswith(("Ambiguous value", "Sweep parameters")):  # 1,2 and range(1,2)
            several = re.search(r"'(.*)'", what)
            return UserError("several values for one run", several[1] if several else word, "add --multirun to train once with each, or write a list as [1,2]")
        if dataclasses.is_dataclass(kind):
            return UserError("this is a section, its words are set one by one", word, f"write e.g. {key}.{dataclasses.fields(kind)[0].name}=<value>")
        if isinstance(error, OverrideParseException) or what.startswith(SYNTAX):
            return UserError(
                f"this cannot be read: {what}",
                getattr(error, "override", word),
                "put quotes around a value with brackets, commas, spaces or = in it: 'word=\"value\"'",
            )
        takes = EXPECTED.get(getattr(kind, "__name__", ""))
        return UserError(f"this word takes {takes.partition(',')[0]}", word, f"give {takes}") if takes else UserError(what, word, HELP_HINT)


OPTIONAL = ("model.rope_scaling", "stage.lora")
EXPECTED = {"int": "a whole number, e.g. 100", "float": "a number, e.g. 5e-4", "bool": "true or false", "list": "a list in brackets, e.g. [0.9,0.95]"}
SYNTAX = ("mismatched input", "extraneous input", "no viable alternative", "token recognition error")  # of one word by itself Hydra says no more
HELP_HINT = "python runner/train.py --help shows the words, --hydra-help those of Hydra"
