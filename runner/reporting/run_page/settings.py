"""The settings of a saved run, and which of them differ from those of a run of the same stage without overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from common.errors import UserError
from common.paths import CONF_DIR
from runner.config.compose import compose_values
from runner.reporting.page_template import flatten_settings
from runner.reporting.sweep_results.metrics_reader import read_override_list
from runner.run_dir.saved_config import load_saved_config

INTERPOLATED = "${workspace:}"


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    default: str | None  # of a run of the same stage; None: it has no such setting

    @property
    def differs(self) -> bool:
        if self.default is not None and self.default.startswith(INTERPOLATED):  # a folder of this machine
            return not self.value.endswith(self.default.partition("}")[2])
        return self.value != self.default


def read_settings(folder: Path) -> tuple[list[Setting], list[str]]:
    """Return the composed settings and the overrides of the run in `folder`; no settings where they cannot be read.
    Nothing in the files is resolved.
    """
    overrides = read_override_list(folder / ".hydra" / "overrides.yaml")
    try:
        config = load_saved_config(folder)
    except (UserError, OSError, ValueError):
        return [], overrides
    stage = config.get("stage")
    default = stage_defaults(str(stage.get("name")) if isinstance(stage, Mapping) else "")
    return [
        Setting(key, value, default.get(key)) for key, value in flatten_settings(config) if not key.startswith("hydra.")
    ], overrides


@lru_cache(maxsize=16)
def stage_defaults(stage: str) -> dict[str, str]:
    """Return the settings of `train.py stage=<stage>` by key, uninterpolated as in a saved config; those of train.py
    for a stage that is not in conf/.
    """
    known = {path.stem for path in (CONF_DIR / "stage").glob("*.yaml")}
    return dict(flatten_settings(compose_values([f"stage={stage}"] if stage in known else [])))
