"""The saved config of a run, `.hydra/config.yaml`, read as data: nothing in it is executed, resolved or followed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import read_bounded
from common.guarded_files import check_own_files
from common.limits import parse_yaml
from common.paths import REPO_ROOT

CONFIG_FILE = Path(".hydra") / "config.yaml"


OVERRIDES_FILE = Path(".hydra") / "overrides.yaml"


REPO_INTERPOLATION = "${repo:}"


MAX_YAML_BYTES = 1 << 20  # bytes; larger YAML files are not read


def load_saved_config(folder: Path) -> dict[str, Any]:
    """Return the content of the saved config.yaml."""
    config = read_saved(folder / CONFIG_FILE, folder)
    if not isinstance(config, dict):  # killed before Hydra wrote it
        raise UserError("the run has no saved config", folder / CONFIG_FILE, restore_hint(folder))
    return config


def restore_hint(folder: Path) -> str:
    return f"resume={folder} restores it if a checkpoint is whole; otherwise start the run again with its overrides and another hydra.run.dir=DIR"


def read_saved(path: Path, folder: Path) -> Any:
    check_own_files(folder, (), shallow=(path.parent.relative_to(folder).name,))
    try:
        return load_yaml(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the saved config cannot be read: {error}", path, restore_hint(folder)) from error


def load_yaml(path: Path) -> Any:
    """Return the content of a small regular YAML file. Raises OSError, or ValueError if it is not YAML."""
    return parse_yaml(read_bounded(path, MAX_YAML_BYTES).decode("utf-8"))


def load_literal_config(folder: Path) -> dict[str, Any]:
    """Return the content of the saved config.yaml, without interpolations and keys that could name code."""
    config: dict[str, Any] = reject_interpolations(load_saved_config(folder), "", folder / CONFIG_FILE)
    return config


def reject_interpolations(value: Any, key: str, path: Path, is_resolved: bool = True) -> Any:
    """Return `value` of `key` in `path` with paths of this checkout.

    Raises UserError for an interpolation that would be resolved, which could read the environment, and for a key such
    as `_target_`, which could name code.
    """
    if isinstance(value, dict):
        if special := next((name for name in value if str(name).startswith("_") and str(name).endswith("_")), None):
            raise UserError(
                f"the saved config has the key {special}, which names code",
                f"{path}: {key}.{special}",
                "do not resume this directory; nothing was run",
            )
        return {
            name: reject_interpolations(item, f"{key}.{name}".lstrip("."), path, is_resolved)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [reject_interpolations(item, key, path, is_resolved) for item in value]
    if is_resolved and isinstance(value, str) and "${" in (value := rebase_repo_path(value)):
        raise UserError(
            "the saved config has an interpolation", f"{path}: {key}={value}", "write the value itself into the file"
        )
    return value


def rebase_repo_path(value: str) -> str:
    """Return a path that starts with ${repo:} as one of this checkout."""
    return str(REPO_ROOT) + value.removeprefix(REPO_INTERPOLATION) if value.startswith(REPO_INTERPOLATION) else value


def freeze_values(value: Any, written: Any) -> Any:
    """Return the resolved `value` to be saved in place of `written`; paths below ${repo:} are kept as they are written."""
    if isinstance(value, dict):
        return {
            key: freeze_values(item, written.get(key) if isinstance(written, dict) else None)
            for key, item in value.items()
        }
    return written if isinstance(written, str) and rebase_repo_path(written) == value else value
