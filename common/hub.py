"""Names and the local cache of models and data sets of the Hugging Face hub.

A name is `owner/name`, or `owner/name@revision` with a branch, a tag or a commit. A commit's files never change.

The cache has a folder `models--OWNER--NAME` per model: `refs/REVISION` holds the commit of a branch or tag,
`snapshots/COMMIT/` the files, as links to `blobs/HASH`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.filesystem import read_bounded

CACHE_PREFIX = "models--"  # of the folder of a model in the cache
SNAPSHOTS = "snapshots"  # folder of it
DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
NAME_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"  # of owner and name, as the hub allows them
REPO = re.compile(f"{NAME_PART}/{NAME_PART}")
MODEL_NAME = re.compile(rf"({REPO.pattern})(?:@([A-Za-z0-9][A-Za-z0-9_./-]{{0,127}}))?")
SNAPSHOT = re.compile(rf"(?:^|/){CACHE_PREFIX}([^/]+?)--([^/]+)/{SNAPSHOTS}/({COMMIT.pattern})(?:/|$)")
FILE_SUFFIXES = (".pth", ".safetensors", ".bin", ".json")  # of files that a missing path may mean


@dataclass(frozen=True)
class HubName:
    """A model of the hub at a revision: a branch, a tag or a commit."""

    repo: str  # owner/name
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"

    @property
    def is_fixed(self) -> bool:
        return COMMIT.fullmatch(self.revision) is not None


def parse_hub_name(text: str) -> HubName | None:
    """Return the name if `text` has the form of one and is no local path.

    It is one if it exists, and also if only its folder does, as in a mistyped `outputs/run`: there owner/name@main
    means the hub.
    """
    match = MODEL_NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1] or text.endswith(FILE_SUFFIXES) or os.path.lexists(text):
        return None
    if match[2] is None and os.path.isdir(text.partition("/")[0]):
        return None
    return HubName(match[1], match[2] or DEFAULT_REVISION)


def hub_name_of(path: Path) -> HubName | None:
    """Return the model and the commit of a folder `models--OWNER--NAME/snapshots/COMMIT` or of a path in it, which may
    no longer exist; else None.
    """
    match = SNAPSHOT.search(str(path))
    is_name = match and REPO.fullmatch(f"{match[1]}/{match[2]}")  # a path that a file names may hold any characters
    return HubName(f"{match[1]}/{match[2]}", match[3]) if match and is_name else None


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


def find_base_model(folder: Path, settings: dict[str, Any]) -> tuple[Path | None, HubName | None]:
    """Return the folder of the base model of an adapter, None if it is not on this machine, and its name on the hub.

    `settings`: adapter_config.json of the adapter in `folder`. Raises KeyError or TypeError for another form.
    """
    name, revision = settings["base_model_name_or_path"], settings.get("revision")
    of_hub = parse_hub_name(f"{name}@{revision}" if revision else name)
    for base in (folder / name, Path(name)):
        if os.path.isdir(base):  # Path.is_dir raises an error for a name that is too long
            return base, of_hub
    return cached_snapshot(of_hub) if of_hub else None, of_hub


def snapshot_link_target(path: Path) -> Path | None:
    """Return the blob that a link in a snapshot means; None for any other link: only one to a regular file in `blobs`
    of the same model is followed.
    """
    home = path.parent.resolve()
    cache = next((parent for parent in home.parents if parent.name.startswith(CACHE_PREFIX)), None)
    if cache is None or home.relative_to(cache).parts[0] != SNAPSHOTS:
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        return None
    return target if target.parent == cache / BLOBS else None
