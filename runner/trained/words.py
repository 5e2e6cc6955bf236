"""Words of a command line that hold free text."""
from __future__ import annotations

import re


def literal(arguments: list[str], words: tuple[str, ...]) -> list[str]:
    """The same arguments with the values of `words` quoted for Hydra, which otherwise stumbles over the comma in "yes, but" and the quote in "what's".

    `word=null` stays null.
    """
    return [f"{word}={_quoted(value)}" if word in words and equals and value != "null" else argument for argument in arguments for word, equals, value in [argument.partition("=")]]


def _quoted(value: str) -> str:
    """A Hydra string whose value is `value`, to the character. Only backslashes before something special are doubled: both grammars ask for that."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # not an interpolation
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)$", r"\1\1", value) + "'"
