"""Byte-level BPE: train a tokenizer folder that `AutoTokenizer` loads, and read one with the `tokenizers` library alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

PAD, BOS, EOS = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
# Whole tokens too, but words of the assistant: decoding keeps them.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SMALLEST = len(SPECIAL) + len(TAGS) + 256  # the control tokens and one symbol a byte
LONGEST_WORD = 16  # bytes; Chinese is written without spaces, and a sentence seen often must not become one token
MODEL_MAX_LENGTH = 32768
COPY_AGAIN = "copy the tokenizer folder again"
TRAIN_ONE = "train one: python runner/tokenizer.py path=[text.jsonl] to=my_tokenizer"


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, chat_template: str) -> Tokenizer:
    """Train on `texts` (read once, as a stream) and write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    if vocab_size < SMALLEST:
        what = f"{SMALLEST} words are taken by the control tokens and the 256 bytes"
        raise ValueError(what, f"vocab_size={vocab_size}", f"choose at least {SMALLEST}, e.g. 6400")
    engine = Engine(models.BPE())
    # Digits stay apart: a number is read digit by digit, whatever numbers the training text held.
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=token in SPECIAL) for token in SPECIAL + TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_WORD,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    _write(folder, engine, chat_template)
    return Tokenizer.load(folder)


def _write(folder: Path, engine: Engine, chat_template: str) -> None:
    stored = json.loads(engine.to_str())
    for token in stored["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the trainer marks every reserved token special
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the one name that transformers 4 and 5 both know
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": PAD,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(stored, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


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
        return _built(folder, _read(folder / "tokenizer.json"), _read(folder / "tokenizer_config.json"), _read(beside) if beside.exists() else None)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: `<|im_end|>` in it is ten ordinary characters, never the token."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._full.decode(list(ids), skip_special_tokens=skip_special)


@lru_cache(maxsize=2)  # who checks a run, reads its rows and trains it asks for the same one
def _built(folder: Path, text: str, settings: str, beside: str | None) -> Tokenizer:
    """`text` is tokenizer.json, `settings` tokenizer_config.json; the template `beside` them wins over the field, as in transformers."""
    stored, config = _parsed(text, folder / "tokenizer.json"), _parsed(settings, folder / "tokenizer_config.json")
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
        raise ValueError(f"a tokenizer of the kind {stored['model']['type']}; only byte-level BPE is read", f"{folder}/tokenizer.json", TRAIN_ONE)
    control = {token["content"] for token in stored["added_tokens"]}
    words = {word: word_id for word, word_id in stored["model"]["vocab"].items() if word not in control}
    return {**stored, "added_tokens": [], "post_processor": None, "model": {**stored["model"], "vocab": words}}


def _engine(stored: dict, folder: Path) -> Engine:
    try:
        engine = Engine.from_str(json.dumps(stored))
    except Exception as error:  # the library raises bare Exception and tells what is wrong only in its text
        raise ValueError(f"the tokenizer cannot be built: {error}", f"{folder}/tokenizer.json", TRAIN_ONE) from error
    engine.no_truncation()
    engine.no_padding()
    return engine


def _id(engine: Engine, named: dict[str, str], word: str, folder: Path) -> int:
    token_id = engine.token_to_id(named.get(word, ""))
    if token_id is None:
        raise ValueError(f"the tokenizer has no {word}", f"{folder}/tokenizer_config.json", f"name one of its tokens there, or {TRAIN_ONE}")
    return token_id


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError("a file of the tokenizer is missing", str(path), f"point to a tokenizer folder, or {TRAIN_ONE}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not text in UTF-8: {error}", str(path), COPY_AGAIN) from error


def _parsed(text: str, path: Path) -> dict:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"broken JSON: {error}", str(path), COPY_AGAIN) from error


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token
