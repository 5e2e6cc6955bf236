"""Files that claim or expand to sizes beyond this machine, nest without end, or hold numbers that are none: JSON, YAML,
weights, tables, tokenizers.
"""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable
from typing import Any

from harness import TRAIN, Folder, HostileCase

CATEGORY = "sizes and nesting"
CHAT = "chat run=model prompt=hello max_new_tokens=2 device=cpu"
DEEP, MANY = "[" * 100_000, "[" + "[]," * 4_000_000 + "[]]"
YAML_ALIASES = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in zip("abcdefghijkl", "bcdefghijklm", strict=True)
)
BOMB_MIB = 256
Build = Callable[[Folder], object]


def replace(base: str, name: str, content: str | bytes) -> Build:
    """A copy of `base` with `name` replaced by `content`."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.copy(base, base.removeprefix("new_"))
        folder.write(f"{base.removeprefix('new_')}/{name}", content)

    return build


def change_json(base: str, name: str, change: Callable[[dict[str, Any]], object]) -> Build:
    """A copy of `base` with the JSON file `name` changed."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        file = folder.copy(base) / name
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return build


def claim_tensor(folder: Folder) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [1048576, 1048576], "data_offsets": [0, 4398046511104]}}'
    (folder.copy("model") / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def sparse_weights(folder: Folder) -> None:
    """1 TB on no disk space."""
    with open(folder.copy("model") / "model.safetensors", "r+b") as file:
        file.truncate(1 << 40)


def rank_of_a_trillion(folder: Folder) -> None:
    folder.copy("chats.jsonl")
    folder.copy("model")


def data(name: str, content: bytes) -> Build:
    return lambda folder: folder.write(name, content)


def bomb(name: str, compress: Callable[[bytes], bytes]) -> Build:
    return lambda folder: folder.write(name, compress(b'{"text": "' + b"a" * (BOMB_MIB << 20)))


def repeated_rows(folder: Folder) -> None:
    """A Parquet file of a few kilobytes whose rows are 40 GB."""
    import pyarrow
    import pyarrow.parquet

    values = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 40_000, pyarrow.int32()), pyarrow.array(["a" * 1_000_000])
    )
    table = pyarrow.table({"text": values})
    pyarrow.parquet.write_table(
        table, folder.work / "rows.parquet", compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 30
    )


def split_by(pattern: str) -> Callable[[dict[str, Any]], None]:
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return lambda stored: stored["pre_tokenizer"]["pretokenizers"].insert(0, part)


def grow(stored: dict[str, Any]) -> None:
    stored["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1_000_000}


def case(name: str, build: Build, message: str, *commands: str, is_light: bool = True) -> HostileCase:
    return HostileCase(name, CATEGORY, build, commands, message, is_light=is_light)


def train_on(name: str) -> str:
    return TRAIN.replace("data.path=rows.jsonl", f"data.path={name}")


TYPED = f"{TRAIN} data.tokenizer=tokenizer"
CASES = [
    case("deep run.json", replace("new_run", "run.json", '{"status": "new", "a": ' + DEEP), "run.json: cannot be read", "train resume=run"),
    case("many values in run.json", replace("new_run", "run.json", '{"a": ' + MANY + "}"), "run.json: cannot be read", "train resume=run"),
    case("status twice in run.json", replace("new_run", "run.json", '{"status": "new", "status": "completed"}'), "run.json: cannot be read", "train resume=run"),
    case("infinite number in run.json", replace("new_run", "run.json", '{"status": "new", "step": 1e400}'), "run.json: cannot be read", "train resume=run"),
    case("5000 digits in run.json", replace("new_run", "run.json", '{"step": ' + "9" * 5000 + "}"), "run.json: cannot be read", "train resume=run"),
    case("deep sweep.json", replace("sweep", "sweep.json", '{"jobs": ' + DEEP), "sweep.json cannot be read", "train resume=sweep"),
    case("deep saved config", replace("new_run", ".hydra/config.yaml", "a: " + DEEP), "nested deeper", "train resume=run"),
    case("aliases in the saved config", replace("new_run", ".hydra/config.yaml", YAML_ALIASES), "aliases are not allowed", "train resume=run"),
    case("aliases in the saved overrides", replace("new_run", ".hydra/overrides.yaml", "- &a x\n- *a\n"), "aliases are not allowed", "train resume=run"),
    case("number to the base 60 in the saved config", replace("new_run", ".hydra/config.yaml", "a: " + "1:" * 100_000 + "1"), "a number of more", "train resume=run"),
    case("tag in the saved config", replace("new_run", ".hydra/config.yaml", "a: !!python/object/apply:os.system [echo]"), "tags are not", "train resume=run"),
    case("deep copy of conf/", replace("new_run", ".hydra/conf/model/tiny.yaml", "a: " + DEEP), "nested deeper", "train resume=run train.log_every=3"),
    *(
        case(f"{name} expands", bomb(name, compress), "more than 200 times", train_on(name), is_light=False)
        for name, compress in (("rows.jsonl.gz", gzip.compress), ("rows.jsonl.bz2", bz2.compress))
    ),
    case("Parquet of 40 GB", repeated_rows, "more than 200 times", train_on("rows.parquet"), is_light=False),
    case("array of brackets", data("rows.json", b"[" * (8 << 20)), "brackets are open", train_on("rows.json"), is_light=False),
    case("deep row", data("rows.jsonl", b'{"text":' * 100_000), "JSON", TRAIN, is_light=False),
    case("row of 20 million objects", data("rows.jsonl", b'{"text": [' + b"{}," * 20_000_000 + b"{}]}\n"), "more than 4,000,000 values", TRAIN, is_light=False),
    *(
        case(f"{key}={value} in config.json", change_json("model", "config.json", lambda raw, key=key, value=value: raw.update({key: value})), "do not fit the model", CHAT, is_light=False)
        for key, value in (("num_hidden_layers", 10**7), ("vocab_size", 2**40), ("intermediate_size", 2**40))
    ),
    case("deep config.json", replace("model", "config.json", '{"a": ' + DEEP), "nested deeper", CHAT, is_light=False),
    case("NaN in config.json", change_json("model", "config.json", lambda raw: raw.update(rms_norm_eps=float("nan"))), "NaN is no JSON number", CHAT, is_light=False),
    case("text for a number in config.json", change_json("model", "config.json", lambda raw: raw.update(num_hidden_layers=2.5)), "another type", CHAT, is_light=False),
    case("tensor of 4 TB in 100 bytes", claim_tensor, "the file of weights is damaged", CHAT, is_light=False),
    case("weights of 1 TB on no disk space", sparse_weights, "damaged", CHAT, is_light=False),
    case("header of 2^63 bytes", replace("model", "model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "its header has", CHAT, is_light=False),
    case("model of 10 million layers", replace("tokenizer", "x", ""), "at most 100,000 are allowed", f"{TRAIN} model.num_hidden_layers=10000000", is_light=False),
    case("adapters of rank 1e12", rank_of_a_trillion, "more than fit into", f"{train_on('chats.jsonl')} stage=lora init_from=model stage.lora.rank=1000000000000", is_light=False),
    case("deep tokenizer.json", replace("tokenizer", "tokenizer.json", DEEP), "nested deeper", TYPED),
    case("tokenizer.json without a model", replace("tokenizer", "tokenizer.json", "{}"), "missing or has another type", TYPED),
    case("normalizer that expands a text", change_json("tokenizer", "tokenizer.json", grow), "times as long", TYPED),
    case("token id 2^31", change_json("tokenizer", "tokenizer.json", lambda stored: stored["model"]["vocab"].update(zzz=2**31)), "outside of", TYPED),
    case("nested quantifiers in tokenizer.json", change_json("tokenizer", "tokenizer.json", split_by("(a+)+b")), "is not usable", TYPED, is_light=False),
    case("three adjacent quantifiers in tokenizer.json", change_json("tokenizer", "tokenizer.json", split_by("a+a+a+b")), "is not usable", TYPED, is_light=False),
]  # fmt: skip
