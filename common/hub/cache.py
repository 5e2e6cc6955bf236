"""The local cache of what was downloaded from the Hugging Face hub, as huggingface_hub lays it out.

It has a folder `models--OWNER--NAME` per model: `refs/REVISION` holds the commit of a branch or tag, `snapshots/COMMIT/` the files, as links to
`blobs/HASH`.
"""

from __future__ import annotations

import os
from pathlib import Path

from common.filesystem import read_bounded
from common.hub.names import CACHE_PREFIX, COMMIT, SNAPSHOTS, HubName

BLOBS = "blobs"  # folder of the files, beside SNAPSHOTS
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE_VALUES = ("1", "ON", "YES", "TRUE")


def hub_cache_dir() -> Path:
    """Return the cache that huggingface_hub uses, from the same environment variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def is_hub_offline() -> bool:
    return any(os.environ.get(variable, "").upper() in TRUE_VALUES for variable in OFFLINE_VARIABLES)


def model_cache_dir(name: HubName) -> Path:
    """Return the folder of a model in the cache, whether it exists or not."""
    return hub_cache_dir() / f"{CACHE_PREFIX}{name.repo.replace('/', '--')}"


def cached_snapshot(name: HubName) -> Path | None:
    """Return the folder of the files of this revision, None if the cache has none."""
    home, commit = model_cache_dir(name), name.revision
    if not name.is_fixed:
        try:
            commit = read_bounded(home / "refs" / name.revision, 256).decode("ascii").strip()
        except (OSError, ValueError):
            return None
    folder = home / SNAPSHOTS / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def snapshot_link_target(path: Path) -> Path | None:
    """Return the blob that a link in a snapshot means; None for any other path: only a link to a regular file in `blobs` of the same model is one."""
    if not path.is_symlink():
        return None
    home = path.parent.resolve()
    cache = next((parent for parent in home.parents if parent.name.startswith(CACHE_PREFIX)), None)
    if cache is None or home.relative_to(cache).parts[0] != SNAPSHOTS:
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return None
    return target if target.parent == cache / BLOBS else None
