"""Control, direction and escape characters in names, rows and strings of files: none reaches a terminal, a log or a
page as it is.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from harness import TINY_RUN, TRAIN, Folder, HostileCase

CATEGORY = "text"
TEXT = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eexe.\u2066\u200b\u2028\r\x00end"
ESCAPED_TEXT = "\\x1b[2J"  # how it is printed
NAME = "\x1b[2J\u202ea\x07"  # of a file: without a NUL character
QUOTED_NAME = f"'{NAME}'"
ROWS = TINY_RUN.replace("data.path=rows.jsonl", "n=2 plain=true")


def rows(folder: Folder) -> None:
    """Rows that train, with hostile text and hostile names of fields."""
    row = {"text": f"{TEXT} goats sing {TEXT}", TEXT: TEXT}
    folder.write("rows.jsonl", "".join(json.dumps(row) + "\n" for _ in range(40)))


def chats(folder: Folder) -> None:
    messages = [{"role": "user", "content": TEXT, TEXT: TEXT}, {"role": "assistant", "content": TEXT}]
    folder.write("chats.jsonl", "".join(json.dumps({"messages": messages}) + "\n" for _ in range(40)))


def bad_rows(*lines: Any) -> Any:
    return lambda folder: folder.write(
        "rows.jsonl", "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n"
    )


def named(folder: Folder) -> None:
    """Files and folders with a hostile name."""
    folder.copy("rows.jsonl", f"{NAME}.jsonl")
    folder.copy("new_run", NAME)
    (folder.work / f"{NAME}.parquet").write_bytes(b"PAR1 not")


def trained_named(folder: Folder) -> None:
    folder.copy("run", NAME)
    folder.copy("model", f"{NAME}m")


def run_json(folder: Folder) -> None:
    file = folder.copy("new_run", "run") / "run.json"
    fields = {
        "status": "failed",
        "outcome": "failed",
        "error": TEXT,
        "init_from": TEXT,
        "code": {"commit": TEXT},
        "host": TEXT,
        "inexact_because": [TEXT],
    }
    file.write_text(
        json.dumps(
            json.loads(file.read_text())
            | fields
            | {"exact": False, "degraded": TEXT, "tokenizer_source": TEXT, "checkpoint": TEXT}
        )
    )


def saved_config(folder: Folder) -> None:
    file = folder.copy("new_run", "run") / ".hydra" / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["train"]["sample_prompts"] = [TEXT]
    config["data"]["path"] = TEXT.replace("\x00", "")
    file.write_text(json.dumps(config))
    overrides = folder.work / "run" / ".hydra" / "overrides.yaml"
    overrides.write_text(json.dumps([*yaml.safe_load(overrides.read_text()), f'train.sample_prompts=["{NAME}"]']))


def sweep(folder: Folder) -> None:
    file = folder.copy("sweep") / "sweep.json"
    fields = json.loads(file.read_text())
    for job in fields["jobs"]:
        job |= {
            "status": "failed",
            "outcome": "failed",
            "error": TEXT,
            "last_lines": [TEXT],
            "started": TEXT,
            "ended": TEXT,
        }
    file.write_text(json.dumps(fields | {"created": TEXT, "status": TEXT, "launcher": TEXT}))
    metrics = [
        {
            "kind": "train",
            "step": step,
            "loss": 2.0,
            "tokens": 1,
            "loss_tokens": 1,
            "time": 1.0,
            "attempt": 1,
            TEXT: TEXT,
        }
        for step in (1, 2)
    ]
    (file.parent / "seed=1" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))


def tokenizer(folder: Folder) -> None:
    file = folder.copy("model") / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"eos_token": TEXT, "model_max_length": TEXT, TEXT: TEXT})
    )


def model_config(folder: Folder) -> None:
    file = folder.copy("model") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": TEXT, "architectures": [TEXT]}))


def metrics(folder: Folder) -> None:
    file = folder.copy("run") / "metrics.jsonl"
    file.write_text(json.dumps({"kind": TEXT, "step": TEXT, TEXT: TEXT}) + "\n")


def prompts(folder: Folder) -> None:
    rows(folder)
    folder.write("prompts.yaml", json.dumps({"x": TEXT}))


def case(name: str, build: Any, message: str, *commands: str, code: int = 2, is_light: bool = True) -> HostileCase:
    return HostileCase(name, CATEGORY, build, commands, message, code, is_light)


CASES = [
    case("row that is no JSON", bad_rows({"text": "a"}, TEXT), "rows.jsonl", TRAIN, is_light=False),
    case("row with an unknown field", bad_rows({TEXT: TEXT}), ESCAPED_TEXT, TRAIN, is_light=False),
    case("text that is a list", bad_rows({"text": [TEXT]}), "rows.jsonl", TRAIN, is_light=False),
    case("role of a message", bad_rows({"messages": [{"role": TEXT, "content": TEXT}]}), "\\u001b[2J", TRAIN.replace("train ", "train stage=sft ", 1), is_light=False),
    case("rows that are printed", rows, ESCAPED_TEXT, f"rows {ROWS} data.path=rows.jsonl", code=0, is_light=False),
    case("rows that are printed with ids", rows, "ids", f"rows {ROWS} data.path=rows.jsonl ids=true", code=0, is_light=False),
    case("conversations that are printed", chats, ESCAPED_TEXT, "rows stage=sft data.val_path=null data.val_fraction=0 data.path=chats.jsonl device=cpu plain=true", code=0, is_light=False),
    case("rows that are trained with samples", rows, "loss", f"{TRAIN} train.sample_every=1 train.sample_tokens=4 'train.sample_prompts=[\"{TEXT.replace(chr(0), '')}\"]'", code=0, is_light=False),
    case("rows that a tokenizer is trained on", rows, "token", "tokenizer path=rows.jsonl to=new vocab_size=300", code=0, is_light=False),
    case("names of files and folders", named, ESCAPED_TEXT, f"train resume={QUOTED_NAME}x", f"chat run={QUOTED_NAME} prompt=a", f"report run={QUOTED_NAME}x", f"train resume={QUOTED_NAME}/nothing", is_light=True),
    case("name of a data file that is damaged", named, ESCAPED_TEXT, TRAIN.replace("data.path=rows.jsonl", f"'data.path={NAME}.parquet'"), is_light=False),
    case("name of a data file that is trained on", named, "loss", TRAIN.replace("data.path=rows.jsonl", f"'data.path={NAME}.jsonl'"), code=0, is_light=False),
    case("name of a folder that is created", rows, ESCAPED_TEXT, TRAIN.replace("run.dir=out", f"run.dir='{NAME}'"), code=0, is_light=False),
    case("names of a run and a model", trained_named, ESCAPED_TEXT, f"train resume={QUOTED_NAME}", code=0, is_light=False),
    case("names of a run and a prompt", trained_named, ESCAPED_TEXT, f"chat run={QUOTED_NAME} max_new_tokens=3 device=cpu 'prompt={TEXT.replace(chr(0), '')}'", code=0, is_light=False),
    case("run.json", run_json, "", "train resume=run", "train resume=run --cfg job train.max_steps=x"),
    case("saved config", saved_config, ESCAPED_TEXT, "train resume=run"),
    case("saved config that is printed", saved_config, "u202e", "train resume=run --cfg job", "train resume=run --info config", code=0),
    case("sweep.json", sweep, "seed=1", "report sweep=sweep", code=0),
    case("tokenizer", tokenizer, ESCAPED_TEXT, "chat run=model prompt=hello device=cpu", is_light=False),
    case("model config", model_config, ESCAPED_TEXT, "chat run=model prompt=hello device=cpu", f"{TRAIN} init_from=model", is_light=False),
    case("metrics.jsonl", metrics, "metrics.jsonl", "train resume=run train.max_steps=4", code=0, is_light=False),
    case("flag", rows, ESCAPED_TEXT, f"train '--{NAME}'", f"rows '--{NAME}=1'", f"report '-{NAME}'", f"chat '--{NAME}'"),
    case("override", rows, ESCAPED_TEXT, f"train '{NAME}=1'", f"train 'train.{NAME}=1'", f"rows '{NAME}'", f"chat run=x '{NAME}=1'", f"report 'sweep={NAME}'", f"train 'model={NAME}'", f"train 'optimizer.lr={NAME}'"),
    case("override of Hydra", rows, ESCAPED_TEXT, f"train 'hydra.x={NAME}'", f"train 'hydra/launcher={NAME}'", f"train '--cfg={NAME}'", f"train '--info={NAME}'"),
    case("override that --cfg prints", rows, "u202e", f"train 'train.sample_prompts=[\"{NAME}\"]' --cfg job", f"train 'train.sample_prompts=[\"{NAME}\"]' --info config", f"train 'hydra.job.name=\"{NAME}\"' --cfg hydra", f"chat run=x 'prompt={NAME}' --cfg job", code=0),
]  # fmt: skip
