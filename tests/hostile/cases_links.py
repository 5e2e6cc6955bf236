"""Links, pipes and devices in place of the files and folders of a run, sweep, model, tokenizer or data folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from harness import TRAIN, Folder, HostileCase

CATEGORY = "links and devices"
LINK, SPECIAL = "this is a link", "neither a regular file nor a folder"
RUN_ENTRIES = (
    "run.json",
    ".hydra",
    ".hydra/config.yaml",
    ".hydra/overrides.yaml",
    "checkpoints",
    "metrics.jsonl",
    "train.log",
    "tokenizer",
    "logs",
    ".lock",
)
CHAT = "chat run=model prompt=hello max_new_tokens=2 device=cpu"


def remove(folder: Folder, name: str) -> str:
    path = folder.work / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


def link(base: str, name: str, target: str = "victim") -> Callable[[Folder], None]:
    """Replace `name` in a copy of `base` by a link to a file outside."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.copy(base, base.removeprefix("new_"))
        os.symlink(folder.outside / target, remove(folder, f"{base.removeprefix('new_')}/{name}"))

    return build


def pipe(base: str, name: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.copy(base, base.removeprefix("new_"))
        os.mkfifo(remove(folder, f"{base.removeprefix('new_')}/{name}"))

    return build


def data_link(target: str) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        (folder.work / "data").mkdir()
        os.symlink(target, folder.work / "data" / "rows.jsonl")

    return build


def data_pipe(folder: Folder) -> None:
    os.mkfifo(folder.work / "rows.jsonl")


def case(
    name: str, build: Callable[[Folder], None], message: str, *commands: str, is_light: bool = True, code: int = 2
) -> HostileCase:
    return HostileCase(name, CATEGORY, build, commands, message, code, is_light)


CASES = [
    *(case(f"link in place of {name}", link("new_run", name), "", "train resume=run") for name in RUN_ENTRIES),
    *(case(f"pipe in place of {name}", pipe("new_run", name), "", "train resume=run") for name in ("run.json", ".hydra/config.yaml", "metrics.jsonl", "train.log", ".lock")),
    case("link to /dev/zero in place of run.json", link("new_run", "run.json", "/dev/zero"), "", "train resume=run"),
    case("link in place of sweep.json", link("sweep", "sweep.json"), "", "train resume=sweep", "report sweep=sweep"),
    case("link in place of a job", link("sweep", "seed=1", "."), LINK, "train resume=sweep"),
    case("link in place of the report", link("sweep", "report.html"), LINK, "report sweep=sweep"),
    case("link in place of the leaderboard", link("sweep", "leaderboard.csv"), LINK, "report sweep=sweep"),
    case("pipe in place of sweep.json", pipe("sweep", "sweep.json"), "", "train resume=sweep", "report sweep=sweep"),
    *(case(f"link in place of {name} of a model", link("model", name), LINK, CHAT, is_light=False) for name in ("config.json", "model.safetensors", "tokenizer.json")),
    case("link in place of added_tokens.json of a model", link("model", "added_tokens.json"), LINK, f"{TRAIN} init_from=model", is_light=False),
    *(case(f"pipe in place of {name} of a model", pipe("model", name), SPECIAL, CHAT, is_light=False) for name in ("config.json", "model.safetensors", "tokenizer.json")),
    case("link in place of a checkpoint", link("run", "checkpoints/step-00000002"), "", "train resume=run train.max_steps=4", is_light=False),
    case("link in place of the model of a run", link("run", "model"), LINK, "chat run=run prompt=hello device=cpu", f"{TRAIN} init_from=run", is_light=False),
    case("pipe as a data file", data_pipe, "", TRAIN),
    case("device as a data file", data_link("/dev/zero"), "", TRAIN.replace("data.path=rows.jsonl", "data.path=data/rows.jsonl"), "tokenizer path=data/rows.jsonl to=new", "tokenizer path=data to=new"),
    case("loop of links as a data folder", data_link("rows.jsonl"), "", TRAIN.replace("data.path=rows.jsonl", "data.path=data"), "tokenizer path=data to=new"),
]  # fmt: skip
