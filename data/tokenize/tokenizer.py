"""Reads a tokenizer folder (byte-level BPE, as AutoTokenizer reads it) with the `tokenizers` library alone."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Engine

from common.errors import UserError

PAD, BOS, EOS = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
COPY_AGAIN_HINT = "copy the tokenizer folder again"
TRAIN_TOKENIZER_HINT = "train one: python runner/tokenizer.py path=[text.jsonl] to=my_tokenizer"


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer folder. `encode` never produces a control token; their ids are in `control_ids`."""

    folder: Path
    vocab_size: int
    named_tokens: dict[str, str]  # bos_token, eos_token, pad_token, unk_token: variables of chat templates
    bos_id: int
    eos_id: int
    pad_id: int
    control_ids: dict[str, int]  # id of each added token
    special_tokens: frozenset[str]  # added tokens that `decode` skips
    chat_template: str | None
    fingerprint: str
    _full: Engine = field(repr=False)  # with control tokens, for decoding
    _plain: Engine = field(repr=False)  # without control tokens, for encoding

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises UserError if a file is missing or cannot be used."""
        folder = Path(folder)
        template = folder / "chat_template.jinja"
        return _build_tokenizer(
            folder,
            _read_text(folder / "tokenizer.json"),
            _read_text(folder / "tokenizer_config.json"),
            _read_text(template) if template.exists() else None,
        )

    def encode(self, text: str) -> list[int]:
        """Encode plain text: `<|im_end|>` in it becomes ten ordinary characters, not the token."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._full.decode(list(ids), skip_special_tokens=skip_special)


@lru_cache(maxsize=2)  # the checks, the data pipeline and the training of a run load the same one
def _build_tokenizer(folder: Path, tokenizer_json: str, config_json: str, template_file: str | None) -> Tokenizer:
    """The arguments are the contents of the files. chat_template.jinja takes precedence over the field chat_template, as in transformers."""
    stored, config = _parse_json(tokenizer_json, folder / "tokenizer.json"), _parse_json(config_json, folder / "tokenizer_config.json")
    # Without this setting the library warns whenever a loader forks its workers. Its threads are idle then.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    full, plain = _build_engine(stored, folder), _build_engine(_without_control_tokens(stored, folder), folder)
    named = {key: _token_text(config[key]) for key in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(key)}
    bos_id, eos_id, pad_id = (_token_id(full, named, key, folder) for key in ("bos_token", "eos_token", "pad_token"))
    template = config.get("chat_template") if template_file is None else template_file
    return Tokenizer(
        folder=folder,
        vocab_size=full.get_vocab_size(),
        named_tokens=named,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        control_ids={token["content"]: token["id"] for token in stored["added_tokens"]},
        special_tokens=frozenset(token["content"] for token in stored["added_tokens"] if token["special"]),
        chat_template=template,
        fingerprint=hashlib.sha256(json.dumps([stored, bos_id, eos_id, pad_id, template], sort_keys=True).encode()).hexdigest(),
        _full=full,
        _plain=plain,
    )


def _without_control_tokens(stored: dict, folder: Path) -> dict:
    """Return the same BPE without the added tokens, in the vocabulary too: the library rejects merges whose result is missing, so no merge makes one."""
    if stored["model"]["type"] != "BPE":
        message = f"the model of the tokenizer must be byte-level BPE, got {stored['model']['type']}"
        raise UserError(message, f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT)
    control = {token["content"] for token in stored["added_tokens"]}
    vocab = {token: token_id for token, token_id in stored["model"]["vocab"].items() if token not in control}
    return {**stored, "added_tokens": [], "post_processor": None, "model": {**stored["model"], "vocab": vocab}}


def _build_engine(stored: dict, folder: Path) -> Engine:
    try:
        engine = Engine.from_str(json.dumps(stored))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"the tokenizer cannot be loaded: {error}", f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT) from error
    engine.no_truncation()
    engine.no_padding()
    return engine


def _token_id(engine: Engine, named: dict[str, str], key: str, folder: Path) -> int:
    token_id = engine.token_to_id(named.get(key, ""))
    if token_id is None:
        raise UserError(f"the tokenizer has no {key}", f"{folder}/tokenizer_config.json", f"set {key} there to one of its tokens, or {TRAIN_TOKENIZER_HINT}")
    return token_id


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("a file of the tokenizer is missing", str(path), f"name a tokenizer folder, or {TRAIN_TOKENIZER_HINT}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {error}", str(path), COPY_AGAIN_HINT) from error


def _parse_json(text: str, path: Path) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"invalid JSON: {error}", str(path), COPY_AGAIN_HINT) from error


def _token_text(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token
