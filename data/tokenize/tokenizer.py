"""Byte-level BPE: train a tokenizer folder that `AutoTokenizer` loads, and read one with the `tokenizers` library alone."""

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
    """A tokenizer folder, ready for use. Text is text: only `control_ids` names control tokens, `encode` never makes one."""

    folder: Path
    vocab_size: int
    named: dict[str, str]  # bos_token, eos_token, pad_token as a chat template asks for them
    bos_id: int
    eos_id: int
    pad_id: int
    control_ids: dict[str, int]  # every added token and its id
    special: frozenset[str]  # those that `decode` leaves out
    chat_template: str | None
    fingerprint: str
    _full: Engine = field(repr=False)  # knows the control tokens: decodes
    _plain: Engine = field(repr=False)  # cannot produce one: encodes

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        folder = Path(folder)
        beside = folder / "chat_template.jinja"
        return _build_tokenizer(
            folder, _read_json(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json"), _read_json(beside) if beside.exists() else None
        )

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: `<|im_end|>` in it is ten ordinary characters, never the token."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._full.decode(list(ids), skip_special_tokens=skip_special)


@lru_cache(maxsize=2)  # who checks a run, reads its rows and trains it asks for the same one
def _build_tokenizer(folder: Path, text: str, settings: str, beside: str | None) -> Tokenizer:
    """`text` is tokenizer.json, `settings` tokenizer_config.json; the template `beside` them wins over the field, as in transformers."""
    stored, config = _parse_json(text, folder / "tokenizer.json"), _parse_json(settings, folder / "tokenizer_config.json")
    # The threads of `tokenizers` are at rest when a loader forks its workers; say so, or it warns at each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    full, plain = _engine(stored, folder), _engine(_without_control_tokens(stored, folder), folder)
    named = {word: _content(config[word]) for word in ("bos_token", "eos_token", "pad_token", "unk_token") if config.get(word)}
    bos_id, eos_id, pad_id = (_id(full, named, word, folder) for word in ("bos_token", "eos_token", "pad_token"))
    template = config.get("chat_template") if beside is None else beside
    return Tokenizer(
        folder=folder,
        vocab_size=full.get_vocab_size(),
        named=named,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        control_ids={token["content"]: token["id"] for token in stored["added_tokens"]},
        special=frozenset(token["content"] for token in stored["added_tokens"] if token["special"]),
        chat_template=template,
        fingerprint=hashlib.sha256(json.dumps([stored, bos_id, eos_id, pad_id, template], sort_keys=True).encode()).hexdigest(),
        _full=full,
        _plain=plain,
    )


def _without_control_tokens(stored: dict, folder: Path) -> dict:
    """The same BPE with the added tokens taken out, also as words: a merge that made one would no longer load."""
    if stored["model"]["type"] != "BPE":
        raise UserError(f"a tokenizer of the kind {stored['model']['type']}; only byte-level BPE is read", f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT)
    control = {token["content"] for token in stored["added_tokens"]}
    words = {word: word_id for word, word_id in stored["model"]["vocab"].items() if word not in control}
    return {**stored, "added_tokens": [], "post_processor": None, "model": {**stored["model"], "vocab": words}}


def _engine(stored: dict, folder: Path) -> Engine:
    try:
        engine = Engine.from_str(json.dumps(stored))
    except Exception as error:  # the library raises bare Exception and tells what is wrong only in its text
        raise UserError(f"the tokenizer cannot be built: {error}", f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT) from error
    engine.no_truncation()
    engine.no_padding()
    return engine


def _id(engine: Engine, named: dict[str, str], word: str, folder: Path) -> int:
    token_id = engine.token_to_id(named.get(word, ""))
    if token_id is None:
        raise UserError(f"the tokenizer has no {word}", f"{folder}/tokenizer_config.json", f"name one of its tokens there, or {TRAIN_TOKENIZER_HINT}")
    return token_id


def _read_json(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("a file of the tokenizer is missing", str(path), f"point to a tokenizer folder, or {TRAIN_TOKENIZER_HINT}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not text in UTF-8: {error}", str(path), COPY_AGAIN_HINT) from error


def _parse_json(text: str, path: Path) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"broken JSON: {error}", str(path), COPY_AGAIN_HINT) from error


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token
