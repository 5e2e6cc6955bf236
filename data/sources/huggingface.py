"""Data sets by their name on Hugging Face, through the optional library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError

HUB_NAME = "hub:owner/name[@config][:split]"


def load_hub_dataset(word: str) -> Iterator[tuple[Path, str]]:
    """(Arrow file in the cache of `datasets`, name for messages) of the data set that `word` names.

    It may name a folder instead. Without a split: train, or the only one there is. Asks the network where the cache does not have it.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("data sets of Hugging Face need the library datasets", word, "pip install '.[hub]'") from error

    name, config, split = _parse_hub_name(word)
    try:
        found: Any = datasets.load_dataset(name, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # what it raises where there is no such set, or no network
        reason = " ".join(str(error).split())
        raise UserError(f"the data set cannot be loaded: {reason}", word, f"the form is {HUB_NAME}; offline only what the cache holds can be had") from error
    split = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
    if split not in found:
        raise UserError(f"the splits are {', '.join(map(str, found))}", word, f"name one: hub:{name}:{next(iter(found))}")
    for number, shard in enumerate(found[split].cache_files):
        yield Path(shard["filename"]), f"hub:{name}:{split}" + (f"#{number}" if number else "")


def _parse_hub_name(word: str) -> tuple[str, str | None, str | None]:
    rest, split, config = word.removeprefix("hub:"), "", ""
    if not Path(rest).is_dir():
        head, _, tail = rest.rpartition(":")
        rest, split = (head, tail) if head else (rest, "")
    if not Path(rest).is_dir():
        rest, _, config = rest.partition("@")
    return rest, config or None, split or None
