"""What can be known of a launch before torch is imported: its words are right, its files are there, and where it goes."""

from __future__ import annotations

from pathlib import Path

from data.formats import find_sources
from runner.engine.config import Config
from runner.launch import lineage, torchrun
from runner.launch.compose import compose_with_folder
from runner.launch.refusal import nearest_path


def folder_of(job: list[str]) -> Path:
    """The folder of a run whose words are right and whose files are there. Raises ValueError(what, where, fix)."""
    config, folder = compose_with_folder(job)
    check(config)
    lineage.check(config)
    return folder


def check(config: Config) -> None:
    torchrun.check(config.distributed)
    find_sources([path for path in config.data.paths if not path.startswith("hub:")])  # a name on the hub is looked up where it is loaded
    val_path = None if config.data.val_path == "auto" else config.data.val_path
    for word, path in (("data.val_path", val_path), ("data.tokenizer", config.data.tokenizer)):
        if path is not None and not Path(path).exists():
            raise ValueError("there is no such file or folder", f"{word}={path}", nearest_path(path))
