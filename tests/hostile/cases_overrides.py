"""Stored overrides, stored configs and stored settings of Hydra in folders of runs and sweeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import yaml
from harness import TRAIN, Folder, HostileCase

CATEGORY = "stored settings"
RERUN = "--experimental-rerun=payload.pickle"
WRITE_MARKER = 'c__builtin__\neval\n(S\'open("../outside/executed", "w")\'\ntR.'  # a pickle that runs code
EVIL_MODULE = "open('../outside/executed', 'w')\n"
READS = (
    "train resume=run",
    "train resume=run --info config",
    "train resume=run --cfg job",
    "train resume=run train.log_every=3",
)
SWEEP_READS = ("train resume=sweep", "train resume=sweep --cfg job")


def add_payloads(folder: Folder) -> None:
    folder.write("payload.pickle", WRITE_MARKER)
    folder.write("evil.py", EVIL_MODULE)
    folder.write("evil/model/evil.yaml", "x: 1\n")


def change_sweep(folder: Folder, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder.copy("sweep") / "sweep.json"
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))
    add_payloads(folder)


def add_override(folder: Folder, override: Any) -> None:
    file = folder.copy("new_run", "run") / ".hydra" / "overrides.yaml"
    file.write_text(yaml.safe_dump([*yaml.safe_load(file.read_text()), override], allow_unicode=True))
    add_payloads(folder)


def set_value(folder: Folder, key: str, value: Any) -> None:
    """Set the value at a dotted key of the saved config."""
    file = folder.copy("new_run", "run") / ".hydra" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    *parents, last = key.split(".")
    section = config
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    file.write_text(yaml.safe_dump(config))
    add_payloads(folder)


def write_saved(folder: Folder, name: str, content: str) -> None:
    folder.copy("new_run", "run")
    folder.write(f"run/.hydra/{name}", content)
    add_payloads(folder)


def write_hydra_settings(folder: Folder) -> None:
    folder.copy("run")
    folder.write("run/.hydra/hydra.yaml", "hydra: {callbacks: {x: {_target_: os.system}}, run: {dir: ../outside}}")


def write_many(folder: Folder) -> None:
    folder.copy("new_run", "run")
    for number in range(300):
        folder.write(f"run/.hydra/conf/model/m{number}.yaml", "x: 1\n")


def in_run(
    name: str, message: str, build: Callable[..., None], *arguments: Any, commands: tuple[str, ...] = READS[:3]
) -> HostileCase:
    return HostileCase(name, CATEGORY, lambda folder: build(folder, *arguments), commands, message, is_light=True)


def in_sweep(name: str, message: str, change: Callable[[dict[str, Any]], object]) -> HostileCase:
    return HostileCase(name, CATEGORY, partial(change_sweep, change=change), SWEEP_READS, message, is_light=True)


def in_overrides(name: str, override: Any, message: str = "may not hold") -> HostileCase:
    return in_run(name, message, add_override, override)


def in_config(name: str, key: str, value: Any, message: str) -> HostileCase:
    return in_run(name, message, set_value, key, value)


def in_snapshot(name: str, file: str, content: str, message: str) -> HostileCase:
    """A file of .hydra/conf/, which is composed when a resume has overrides."""
    return in_run(name, message, write_saved, f"conf/{file}", content, commands=READS[3:])


CASES = [
    in_overrides("rerun flag", RERUN),
    in_overrides("flag that adds a config folder", "--config-dir=evil"),
    in_overrides("flag that names another config", "-cn=evil"),
    in_overrides("flag after a space", " --experimental-rerun=payload.pickle"),
    in_overrides("package of a group", "model@hydra=evil"),
    in_overrides("section hydra", "hydra={callbacks: {x: {_target_: os.system}}}"),
    in_overrides("resolver of the environment", "data.path=${oc.env:HOME}"),
    in_overrides("resolver of Hydra", "data.path=${hydra:runtime.cwd}"),
    in_overrides("nested resolver", "data.path=${oc.${x}:HOME}"),
    in_overrides("key that is computed", "${oc.env:HOME}=1"),
    in_overrides("empty override", ""),
    in_overrides("override that is a mapping", {"seed": 1}, "not a list of strings"),
    in_overrides("override with control characters", "-\x1b[2J\u202e=1"),
    in_run("overrides that run Python", "cannot be read", write_saved, "overrides.yaml", "!!python/object/apply:os.system ['touch ../outside/executed']"),
    in_run("overrides of an alias bomb", "aliases", write_saved, "overrides.yaml", "a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]\n"),
    in_run("overrides of 100,000 brackets", "cannot be read", write_saved, "overrides.yaml", "[" * 100_000),
    in_run("overrides of 20 MB", "cannot be read", write_saved, "overrides.yaml", "- seed=1\n" * 2_000_000),
    in_config("_target_ in a section", "optimizer._target_", "os.system", "names code"),
    in_config("_target_ below a setting", "train.sample_prompts", [{"_target_": "os.system", "_args_": ["touch x"]}], "names code"),
    in_config("interpolation of the environment", "data.path", "${oc.env:HOME}", "interpolation"),
    in_config("interpolation of Hydra", "data.path", ["${hydra:runtime.cwd}"], "interpolation"),
    in_config("interpolation after ${repo:}", "data.path", "${repo:}/${oc.env:HOME}", "interpolation"),
    in_config("interpolation that decodes", "seed", "${oc.decode:${oc.env:HOME}}", "interpolation"),
    in_config("plugin of the folder", "plugins", ["evil.py"], "plugin"),
    in_config("plugin by its module name", "plugins", ["evil"], "plugin"),
    in_config("section hydra", "hydra", {"callbacks": {"x": {"_target_": "os.system"}}}, "hydra"),
    in_config("unknown setting with control characters", "train.\x1b[2J\u202e", 1, "\\x1b[2J"),
    in_config("text in place of a section", "train", "\x1b[2J\u202e", "train"),
    in_config("number in place of a section", "model", 7, "model"),
    in_config("list in place of a section", "optimizer", [1], "optimizer"),
    in_config("infinite number", "train.max_steps", float("inf"), "cannot be read"),
    in_config("number of 400 digits", "train.max_steps", 10**400, "cannot be read"),
    in_config("choice that is not registered", "optimizer.name", "os.system", "optimizer.name"),
    in_config("choice that is a module", "model.family", "..evil", "model.family"),
    in_run("config that runs Python", "cannot be read", write_saved, "config.yaml", "!!python/name:os.system"),
    in_run("config that is a list", "no saved config", write_saved, "config.yaml", "- 1\n"),
    in_run("config with control characters", "cannot be read", write_saved, "config.yaml", "a: \x1b[2J"),
    in_snapshot("snapshot with a searchpath", "config.yaml", "defaults: [model: tiny]\nhydra: {searchpath: ['file://evil']}\nseed: 1\n", "data.path"),
    in_snapshot("snapshot with a defaults list of other folders", "config.yaml", "defaults: [../../evil]\n", "not written by this program"),
    in_snapshot("snapshot with a computed defaults list", "config.yaml", "defaults: ['${oc.env:HOME}']\n", "not written by this program"),
    in_snapshot("snapshot in the package of Hydra", "model/tiny.yaml", "# @package hydra\nx: 1\n", "not written by this program"),
    in_snapshot("snapshot that names code", "model/tiny.yaml", "_target_: os.system\n", "names code"),
    in_snapshot("snapshot with an odd name", "model/a b\u202e.yaml", "x: 1\n", "not written by this program"),
    in_run("snapshot of 300 files", "311 files", write_many, commands=READS[3:]),
    in_sweep("flag for all jobs", "may not hold", lambda fields: fields.update(overrides=[RERUN])),
    in_sweep("resolver for all jobs", "may not hold", lambda fields: fields["overrides"].append("data.path=${oc.env:HOME}")),
    in_sweep("callback for all jobs", "may not hold", lambda fields: fields["overrides"].append("hydra.callbacks.x._target_=os.system")),
    in_sweep("flag as a swept key", "sweep.json", lambda fields: fields["jobs"][0]["overrides"].update({"--experimental-rerun": "payload.pickle"})),
    in_sweep("flag as a value that is pending", "may not hold", lambda fields: fields["jobs"][0].update(pending_overrides=[RERUN])),
    in_sweep("flag as a value that was applied", "may not hold", lambda fields: fields["jobs"][0].update(applied_overrides=[RERUN])),
    in_sweep("plugin of a job", "plugin", lambda fields: fields["jobs"][0].update(pending_overrides=["plugins=[evil.py]"])),
    in_sweep("job in a folder outside", "sweep.json", lambda fields: fields["jobs"][0].update(name="../../outside/job")),
    in_sweep("job with control characters", "sweep.json", lambda fields: fields["jobs"][0].update(name="\x1b[2J\u202e/..")),
    in_sweep("jobs that are no list", "sweep.json", lambda fields: fields.update(jobs={"a": 1})),
    in_sweep("numbers in place of texts", "sweep.json", lambda fields: fields["jobs"][0].update(name=7, overrides=7)),
    HostileCase("hydra.yaml with a callback is not read", CATEGORY, write_hydra_settings, ("train resume=run",), "already complete", code=0),
    HostileCase("plugin of hydra_plugins in the folder", CATEGORY, lambda folder: (folder.copy("rows.jsonl"), folder.write("hydra_plugins/evil.py", EVIL_MODULE)), (TRAIN,), "loss", code=0),
    HostileCase("modules of the standard library in the folder", CATEGORY, lambda folder: (folder.copy("rows.jsonl"), [folder.write(f"{name}.py", EVIL_MODULE) for name in ("json", "yaml", "torch", "sitecustomize", "common", "data")]), (TRAIN,), "loss", code=0),
]  # fmt: skip
