"""Stored overrides, stored configs and stored settings of Hydra in folders of runs and sweeps."""

from __future__ import annotations

import json
from typing import Any

import yaml
from harness import Folder, HostileCase

CATEGORY = "stored settings"
FLAG = "--experimental-rerun=payload.pickle"
CALL_OS = 'c__builtin__\neval\n(S\'open("executed", "w")\'\ntR.'


def change_sweep(folder: Folder, **fields: Any) -> None:
    file = folder.copy("sweep") / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    folder.write("payload.pickle", CALL_OS)


def add_override(folder: Folder, override: str) -> None:
    file = folder.copy("run") / ".hydra" / "overrides.yaml"
    file.write_text(yaml.safe_dump([*yaml.safe_load(file.read_text()), override]))
    folder.write("payload.pickle", CALL_OS)


def set_value(folder: Folder, key: str, value: Any) -> None:
    """Set the value at a dotted key of the saved config."""
    file = folder.copy("run") / ".hydra" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    *parents, last = key.split(".")
    section = config
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    file.write_text(yaml.safe_dump(config))


def stored(name: str, override: str) -> HostileCase:
    return HostileCase(name, CATEGORY, lambda folder: add_override(folder, override), ("train resume=run --info config",), "may not hold", is_light=True)


CASES = [
    stored("flag in the overrides of a run", FLAG),
    HostileCase("flag in sweep.json", CATEGORY, lambda folder: change_sweep(folder, overrides=[FLAG]), ("train resume=sweep",), "may not hold", is_light=True),
    HostileCase(
        "key _target_ in the saved config", CATEGORY, lambda folder: set_value(folder, "optimizer._target_", "os.system"), ("train resume=run",),
        "names code", is_light=True,
    ),
]  # fmt: skip
