"""Model folders, adapters, tokenizers, .pth files, data files and caches that want code to run, or memory to be filled."""

from __future__ import annotations

import base64
import json
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

from harness import TRAIN, Folder, HostileCase

CHAT = "chat run=model prompt=hello mode=text max_new_tokens=2 device=cpu"
INIT = f"{TRAIN} init_from=model"
MARKER = "../outside/executed"


class WriteMarker:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (MARKER, "w")


PICKLE = pickle.dumps({"model.embed_tokens.weight": WriteMarker()})
MODULE = f"open({MARKER!r}, 'w')\n"


def config(**fields: Any) -> Callable[[Folder], None]:
    """A model with other fields in config.json, and modules that they may name."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        file = folder.copy("model") / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        for name in ("modeling.py", "configuration.py", "tokenization.py"):
            folder.write(f"model/{name}", MODULE)

    return build


def tokenizer(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        path = folder.copy("model") / file
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
        folder.write("model/tokenization.py", MODULE)

    return build


def files(**contents: bytes | str | None) -> Callable[[Folder], None]:
    """A model where files are replaced (None: removed); names have __ in place of a point."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.copy("model")
        for name, content in contents.items():
            path = f"model/{name.replace('__', '.')}"
            (folder.work / path).unlink(missing_ok=True)
            if content is not None:
                folder.write(path, content)

    return build


def adapter(**fields: Any) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.copy("model", "base")
        defaults = {
            "peft_type": "LORA",
            "base_model_name_or_path": "../base",
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj"],
        }
        folder.write("model/adapter_config.json", json.dumps(defaults | fields))
        folder.write("model/adapter_model.safetensors", safetensors({}))
        folder.write("model/adapter_model.bin", PICKLE)

    return build


def slow_pattern(folder: Folder) -> None:
    folder.copy("chats.jsonl")
    adapter(target_modules=r"((\w|\.)+)+!", lora_dropout=0.0)(folder)
    weights = {"A": [8, 32], "B": [32, 8]}
    header, end = {}, 0
    for name, shape in weights.items():
        start, end = end, end + 4 * 8 * 32
        header[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{name}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [start, end],
        }
    folder.write("model/adapter_model.safetensors", safetensors(header, bytes(end)))


def safetensors(header: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def pth(content: bytes) -> Callable[[Folder], None]:
    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        folder.write("model.pth", content)

    return build


def checkpoint(name: str, content: bytes | str) -> Callable[[Folder], None]:
    """A run whose checkpoint has another file in place of `name`."""

    def build(folder: Folder) -> None:
        folder.copy("rows.jsonl")
        step = next((folder.copy("run") / "checkpoints").glob("step-*"))
        folder.write(str(step.relative_to(folder.work) / name), content)

    return build


def cache(name: str) -> Callable[[Folder], None]:
    """A cache with links to files outside, which the saved config of a run names."""

    def build(folder: Folder) -> None:
        run = folder.copy("new_run", "run")
        folder.copy("rows.jsonl")
        (folder.work / "cache").mkdir()
        os.symlink(folder.outside / "victim", folder.work / "cache" / name)
        file = run / ".hydra" / "config.yaml"
        saved = [line for line in file.read_text().splitlines() if not line.strip().startswith("cache:")]
        at = saved.index("data:") + 1
        file.write_text(
            "\n".join(
                [*saved[:at], f"  cache: {folder.outside if name == 'outside' else folder.work / 'cache'}", *saved[at:]]
            )
        )

    return build


def data(name: str, content: bytes | str) -> Callable[[Folder], object]:
    return lambda folder: folder.write(name, content)


def train_on(name: str) -> str:
    return TRAIN.replace("data.path=rows.jsonl", f"data.path={name}")


def model(name: str, build: Callable[[Folder], object], message: str, *commands: str, code: int = 2) -> HostileCase:
    return HostileCase(name, "models", build, commands or (CHAT, INIT), message, code)


def data_file(name: str, file: str, content: bytes | str, message: str = "") -> HostileCase:
    return HostileCase(name, "data files", data(file, content), (train_on(file),), message)


LONG_CHARSMAP = base64.b64encode(struct.pack("<I", 1024) + bytes(1024) + b"Z" * 1_000_000).decode()
AUTO_MAP = {
    "AutoConfig": "configuration.Config",
    "AutoModelForCausalLM": "modeling.Model",
    "AutoTokenizer": ["tokenization.T", "tokenization.T"],
}
CASES = [
    model("code of the folder in auto_map", config(auto_map=AUTO_MAP, trust_remote_code=True), "trust_remote_code"),
    model("code of the folder for an unknown model", config(auto_map=AUTO_MAP, model_type="evil", architectures=["Evil"]), "evil"),
    model("family of a path", config(model_type="../../evil", architectures=["../evil"]), "evil"),
    model("list in place of a size", config(hidden_size=[1]), "config.json"),
    model("negative size", config(hidden_size=-64), "hidden_size"),
    model("huge vocabulary", config(vocab_size=10**12), ""),
    model("huge number of layers", config(num_hidden_layers=10**7), ""),
    model("huge head", config(head_dim=10**9), ""),
    model("not a number", config(rms_norm_eps=float("nan")), ""),
    model("text in place of a number", config(rope_theta="__import__('os')"), "rope_theta"),
    model("nested rope scaling", config(rope_scaling={"rope_type": {"a": [1]}}), "rope"),
    model("config that is a list", files(config__json="[1]"), "config.json"),
    model("weights as a pickle", files(model__safetensors=None, pytorch_model__bin=PICKLE), ""),
    model("weights that are a pickle", files(model__safetensors=PICKLE), "safetensors"),
    model("weights with a huge header", files(model__safetensors=struct.pack("<Q", 2**62) + b"{}"), "safetensors"),
    model("weights with a huge tensor", files(model__safetensors=safetensors({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})), ""),
    model("weights with overlapping tensors", files(model__safetensors=safetensors({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"}, b"1234")), "safetensors"),
    model("weights with other names", files(model__safetensors=safetensors({"\x1b[2J": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234")), ""),
    model("index to files outside", files(model__safetensors=None, **{"model__safetensors__index__json": json.dumps({"weight_map": {"a": "../../outside/victim"}})}), ""),
    model("adapter whose base is outside", adapter(base_model_name_or_path="/etc"), ""),
    model("adapter of a huge rank", adapter(r=10**9), ""),
    model("adapter of another kind", adapter(peft_type="EVIL", auto_mapping={"parent_library": "evil"}), ""),
    model("adapter with a pattern for modules", adapter(target_modules="(a+)+$"), ""),
    model("pattern of a continued adapter", slow_pattern, "", f"{INIT} stage=lora stage.lora.continue_adapter=true".replace("rows.jsonl", "chats.jsonl"), code=0),
    model("tokenizer class of the folder", tokenizer("tokenizer_config.json", lambda content: content.update(auto_map=AUTO_MAP, tokenizer_class="T")), "", code=0),
    model("tokenizer with a slow pattern", tokenizer("tokenizer.json", lambda content: content.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+(a+)+$"}, "behavior": "Isolated", "invert": False})), "regular expression"),
    model("tokenizer without a vocabulary", tokenizer("tokenizer.json", lambda content: content.update(model={})), "tokenizer"),
    model("tokenizer with ids out of range", tokenizer("tokenizer.json", lambda content: content["added_tokens"].append({**content["added_tokens"][0], "id": 2**31, "content": "<x>"})), "", INIT),
    model("tokenizer with an id that the model has not", tokenizer("tokenizer.json", lambda content: content["model"]["vocab"].update({"\u0120the": 6400})), "6400", f"{TRAIN} init_from=model"),
    model("tokenizer whose normalizer maps a character to a long text", tokenizer("tokenizer.json", lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": LONG_CHARSMAP})), "times as long"),
    model("tokenizer with a slow pattern in its decoder", tokenizer("tokenizer.json", lambda content: content.update(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"})), "not usable"),
    model("template with half a surrogate pair", files(chat_template__jinja="{{ '\\ud800' }}{{ messages[0].content }}"), "surrogate", CHAT.replace("mode=text", "mode=chat")),
    model("adapter whose base has a name of 5000 characters", adapter(base_model_name_or_path="a" * 5000), "does not exist"),
    model("tokenizer that is a list", files(tokenizer__json="[1]"), "tokenizer"),
    model("template that is a list of numbers", files(chat_template__jinja=None, tokenizer_config__json=json.dumps({"chat_template": [1, 2]})), "", CHAT.replace("mode=text", "mode=chat")),
    model("pth with code", pth(PICKLE), "model.pth", f"{TRAIN} init_from=model.pth"),
    model("pth with an old pickle", pth(b"\x80\x02cos\nsystem\nq\x00X\x04\x00\x00\x00trueq\x01\x85q\x02Rq\x03."), "model.pth", f"{TRAIN} init_from=model.pth"),
    model("pth that is a zip bomb", pth(b"PK\x03\x04" + b"\0" * 100), "model.pth", f"{TRAIN} init_from=model.pth"),
    model("pth that is empty", pth(b""), "model.pth", f"{TRAIN} init_from=model.pth"),
    model("checkpoint with a pickle for its state", checkpoint("state.json", PICKLE), "checkpoint", "train resume=run train.max_steps=4"),
    model("checkpoint with a pickle for its weights", checkpoint("model.safetensors", PICKLE), "checkpoint", "train resume=run train.max_steps=4"),
    HostileCase("links in the cache of a saved config", "caches", cache("0" * 64), ("train resume=run",), "is used", code=0),
    HostileCase("cache of a saved config outside", "caches", cache("outside"), ("train resume=run",), "is used", code=0),
    data_file("Parquet file that is cut off", "a.parquet", b"PAR1" + b"\xff" * 1000 + b"PAR1", "a.parquet"),
    data_file("Arrow file that is cut off", "a.arrow", b"ARROW1\0\0" + b"\xff" * 1000, "a.arrow"),
    data_file("gzip file that is cut off", "a.jsonl.gz", b"\x1f\x8b\x08" + b"\0" * 20, "a.jsonl.gz"),
    data_file("zip file", "a.jsonl.zip", b"PK\x03\x04" + b"\0" * 50),
    data_file("pickle as JSON", "a.jsonl", PICKLE, "a.jsonl"),
    data_file("pickle as a table", "a.pkl", PICKLE),
    data_file("numpy file of objects", "a.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + b" " * 60 + b"\n" + PICKLE),
    data_file("nested JSON", "a.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "a.jsonl"),
    data_file("number of a million digits", "a.jsonl", '{"text": "a", "b": ' + "1" * 1_000_000 + "}", "a.jsonl"),
    data_file("one line of 50 MB", "a.jsonl", '{"text": "' + "a" * 50_000_000, "a.jsonl"),
    data_file("row with a private character", "a.jsonl", '{"messages": [{"role": "user", "content": "\ufdd0"}]}', "a.jsonl"),
    data_file("script of a data set", "data", MODULE),
]  # fmt: skip
