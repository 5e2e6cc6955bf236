"""Are the saved settings in `.hydra/` whole? Otherwise they are restored from the text that the checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import make_dirs, read_bounded, write_atomic_file
from common.guarded_files import check_own_files, keep_damaged
from common.limits.parsers import parse_yaml
from runner.config import snapshot
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity
from runner.run_dir import saved_config
from runner.run_dir.saved_config import CONFIG_FILE, MAX_YAML_BYTES, OVERRIDES_FILE, load_yaml


def check_settings(evidence: CheckpointState) -> Iterator[Repair]:
    """Yield the findings about the saved config, the overrides, and the copies of YAML files."""
    folder, texts = evidence.folder, evidence.record["files"]
    check_own_files(folder, (".hydra",))
    for name, load in (
        (str(CONFIG_FILE), saved_config.load_saved_config),
        (str(OVERRIDES_FILE), snapshot.load_overrides),
    ):
        if name not in texts:
            yield _check_loading(folder, name, load)
    for name, text in texts.items():
        state = damage_of(folder / name, text, name)
        if (
            name == str(OVERRIDES_FILE)
            and state is None
            and damage_of(folder / CONFIG_FILE, texts.get(str(CONFIG_FILE), ""), str(CONFIG_FILE))
        ):
            state = _newer_overrides(folder, text)  # the config that they were typed for is restored as it was before
        if state is None:
            yield Repair(Problem(name, Severity.SOUND, "whole"))
        else:
            action = "restored from the checkpoint"
            yield Repair(Problem(name, Severity.DAMAGED, state, action, action), partial(_restore, folder, name, text))


def damage_of(path: Path, text: str, name: str) -> str | None:
    """Return what is wrong with the file in whose place the checkpoint has `text`, None if nothing is.

    A file that was edited and can be read is whole.
    """
    try:
        content = read_bounded(path, MAX_YAML_BYTES)
        if content != text.encode() and text.encode().startswith(content):
            return f"cut off after {len(content):,} of {len(text.encode()):,} bytes"
        tree = load_yaml(path)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())[:200]}"
    if name == str(OVERRIDES_FILE):
        return (
            None
            if isinstance(tree, list) and all(isinstance(override, str) for override in tree)
            else "not a list of overrides"
        )
    if not isinstance(tree, dict) and (tree is not None or parse_yaml(text) is not None):
        return "not a mapping"
    missing = missing_settings(parse_yaml(text), tree) if name == str(CONFIG_FILE) else []
    return f"without the settings {', '.join(missing[:4])}{' ...' * (len(missing) > 4)}" if missing else None


def _newer_overrides(folder: Path, text: str) -> str | None:
    saved = parse_yaml(text) or []
    newer = [override for override in snapshot.load_overrides(folder) if override not in saved]
    return f"newer than the saved config that can be restored: type {' '.join(newer)} again" if newer else None


def missing_settings(saved: dict[str, Any], tree: Any) -> list[str]:
    """Return the settings of `saved` that `tree` lacks.

    Of a section for which another option was chosen since, the settings differ.
    """
    missing = [key for key in saved if key not in tree]
    for section, values in saved.items():
        current = tree.get(section)
        if isinstance(values, dict) and isinstance(current, dict) and values.get("name") == current.get("name"):
            missing += [f"{section}.{key}" for key in values if key not in current]
    return missing


def _check_loading(folder: Path, name: str, load: Callable[[Path], object]) -> Repair:
    try:
        load(folder)
        return Repair(Problem(name, Severity.SOUND, "whole"))
    except UserError as error:
        return Repair(Problem(name, Severity.BLOCKING, error.message, error.fix))


def _restore(folder: Path, name: str, text: str) -> None:
    path = folder / name
    if path.is_file():
        keep_damaged(folder, name, read_bounded(path, 64 * MAX_YAML_BYTES))
    make_dirs(path.parent)
    write_atomic_file(path, text.encode())
