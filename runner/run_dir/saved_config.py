"""What stands in the `.hydra/` of a run, read as data: nothing in it is ever run, nothing outside it is looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.filesystem import read_bounded
from common.paths import REPO_ROOT

CONFIG_FILE = Path(".hydra") / "config.yaml"
OVERRIDES_FILE = Path(".hydra") / "overrides.yaml"
REPO_INTERPOLATION = "${repo:}"
MAX_YAML_BYTES = 1 << 20  # bytes of a YAML file we believe


def load_saved_config(folder: Path) -> dict[str, Any]:
    """The run's configuration, as it is written."""
    found = _read_saved(folder / CONFIG_FILE, folder)
    if not isinstance(found, dict):  # killed before its words were written
        raise UserError("the run has no config yet", str(folder / CONFIG_FILE), f"give its first words again, with hydra.run.dir={folder}")
    return found


def load_overrides(folder: Path) -> list[str]:
    """The words that led there, of all launches; those of Hydra are not the run's."""
    found = _read_saved(folder / OVERRIDES_FILE, folder)
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise UserError(
            "the run's words cannot be read: they are no list of words", str(folder / OVERRIDES_FILE), "put the list back, one `- word=value` a line"
        )
    return [word for word in found if not word.lstrip("+~").startswith(("hydra.", "hydra/"))]


def _read_saved(path: Path, folder: Path) -> Any:
    try:
        return load_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the run's config cannot be read: {error}", str(path), f"give its first words again, with hydra.run.dir={folder}") from error


def load_yaml(path: Path) -> Any:
    """The YAML of a small regular file. Raises OSError, or ValueError where it is none."""
    text = read_bounded(path, MAX_YAML_BYTES).decode("utf-8")
    try:
        if "&" in text and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("it repeats itself by reference")  # a few lines can stand for gigabytes
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error) or "nested too deeply") from error


def reject_interpolations(value: Any, word: str, path: Path) -> Any:
    """Values only: an interpolation could read the environment, `_target_` could name code."""
    if isinstance(value, dict):
        if bad := next((key for key in value if str(key).startswith("_") and str(key).endswith("_")), None):
            raise UserError("a run's config names code", f"{path}: {word}.{bad}", "do not resume this folder; nothing in it was run")
        return {key: reject_interpolations(part, f"{word}.{key}".lstrip("."), path) for key, part in value.items()}
    if isinstance(value, list):
        return [reject_interpolations(part, word, path) for part in value]
    if isinstance(value, str) and "${" in (value := rebase_repo_path(value)):
        raise UserError("a run's config reaches outside", f"{path}: {word}={value}", "write the value itself there")
    return value


def rebase_repo_path(value: str) -> str:
    """A path of the repository, in this checkout of it."""
    return str(REPO_ROOT) + value.removeprefix(REPO_INTERPOLATION) if value.startswith(REPO_INTERPOLATION) else value


def freeze_values(value: Any, written: Any) -> Any:
    """`value` to be written down: what was looked up stays what it was found to be; only paths of the repository follow it."""
    if isinstance(value, dict):
        return {key: freeze_values(part, written.get(key) if isinstance(written, dict) else None) for key, part in value.items()}
    return written if isinstance(written, str) and rebase_repo_path(written) == value else value
