"""Data sets by their name on the Hugging Face Hub, through the optional library `datasets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError

HUB_NAME = "hub:owner/name[@config][:split]"


def load_hub_dataset(name: str, preferred: Sequence[str] = ("train",)) -> Iterator[tuple[Path, str]]:
    """Yield (Arrow file in the cache of `datasets`, name for messages) of each part of the data set `name` (hub:owner/name or hub:FOLDER).

    Without a split in the name it is the first of `preferred` that the data set has, or the only one. Uses the network if the data set is not in the cache.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("data sets of the Hugging Face Hub need the library datasets", name, "pip install '.[hub]'") from error

    path, config, split = _parse_hub_name(name)
    try:
        splits: Any = datasets.load_dataset(path, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:  # no such data set, or no network
        reason = " ".join(str(error).split())
        fix = f"check the name ({HUB_NAME}); without network, only data sets in the cache can be read"
        raise UserError(f"the data set cannot be loaded: {reason}", name, fix) from error
    split = split or next((choice for choice in preferred if choice in splits), next(iter(splits)) if len(splits) == 1 else None)
    if split not in splits:
        raise UserError(
            f"the split must be one of {', '.join(map(str, splits))}, got {split or 'no name of a split'}", name, f"e.g. hub:{path}:{next(iter(splits))}"
        )
    for number, shard in enumerate(splits[split].cache_files):
        yield Path(shard["filename"]), f"hub:{path}:{split}" + (f"#{number}" if number else "")


def _parse_hub_name(name: str) -> tuple[str, str | None, str | None]:
    """Return (path, config, split) of hub:path[@config][:split]; the path of a folder may contain `:` and `@`."""
    path, split, config = name.removeprefix("hub:"), "", ""
    if not Path(path).is_dir():
        head, _, tail = path.rpartition(":")
        path, split = (head, tail) if head else (path, "")
    if not Path(path).is_dir():
        path, _, config = path.partition("@")
    return path, config or None, split or None
