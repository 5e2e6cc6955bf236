"""Reads a tokenizer folder (as AutoTokenizer reads it) with the `tokenizers` library alone."""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine

from common.errors import UserError
from common.filesystem import sha256_of_json
from common.guarded_files import (
    DOWNLOAD_HINT,
    GENERATION_CONFIG,
    MAX_TOKENIZER_BYTES,
    parse_object,
    read_source_file,
    reporting_missing_fields,
)
from data.tokenize.pieces import BytesEncoder, PieceCache, bytes_of_ids, cut_pattern
from data.tokenize.tokenizer_limits import OTHER_TOKENIZER_HINT, SECTIONS, find_problem

PAD, BOS, EOS = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
TOKENIZER_CONFIG, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
TEXT = re.compile(r"[\w\s\u2581-]*")  # an added token that is no control token; \u2581: the space of SentencePiece
# bos_token, eos_token and unk_token of a tokenizer whose files name none, as in transformers
GPT2_TOKEN = "<|endoftext|>"
# by type of a normalizer or a pre-tokenizer: fields with which it puts no space before a text
NO_SPACE: dict[Any, dict[str, Any]] = {
    "Prepend": {"type": "Sequence", "normalizers": []},
    "Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
    "ByteLevel": {"add_prefix_space": False},
}
RARE_TEXT = "\U00013000"  # a hieroglyph: only tokenizers that fall back to bytes have tokens for it
TRAIN_TOKENIZER_HINT = "train one: python runner/tokenizer.py path=[text.jsonl] to=my_tokenizer"


@dataclass(frozen=True)
class _Files:
    """The contents of a tokenizer folder; a copy of it in another folder is equal."""

    folder: Path = field(compare=False)
    tokenizer: str
    config: str
    # None: there is no such file
    template: str | None
    special_tokens_map: str | None
    generation_config: str | None


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer folder. `encode` never produces a control token; their ids are in `control_ids`."""

    folder: Path
    vocab_size: int  # tokens, and ids that no token has: the largest id + 1 at least
    # bos_token, eos_token, pad_token, unk_token, as far as there are: variables of chat templates
    named_tokens: dict[str, str]
    bos_id: int | None  # None: texts begin without one
    eos_id: int
    stop_ids: tuple[int, ...]  # end a generated text: eos_id, and those of generation_config.json
    pad_id: int  # eos_id if there is no pad_token; padding is known by its position, never by its id
    control_ids: dict[str, int]  # id of each added token that is no piece of text
    special_tokens: frozenset[str]  # added tokens that `decode` skips
    chat_template: str | None
    fingerprint: str
    # BPE dropout of tokenizer.json: switched off, because it splits a text in another way each time; 0: none
    dropout: float
    _full: Engine = field(repr=False)  # with control tokens, for decoding
    _plain: Engine = field(repr=False)  # without control tokens, for encoding
    _cuts: re.Pattern[str] | None = field(repr=False)  # cut_pattern of _plain
    stripping: frozenset[str]  # added tokens that take the white space after them
    # of a text that continues another: without the space that this one puts before a text; None: it puts none
    inner: Tokenizer | None
    adds_space_after_control: bool  # a text after a control token gets that space

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Raises UserError if a file is missing or cannot be used."""
        folder = Path(folder)
        optional = (folder / name for name in (TEMPLATE_FILE, SPECIAL_TOKENS_MAP, GENERATION_CONFIG))
        files = _Files(
            folder,
            _read_text(folder / "tokenizer.json"),
            _read_text(folder / TOKENIZER_CONFIG),
            *(_read_text(file) if os.path.lexists(file) else None for file in optional),
        )
        tokenizer = _build_tokenizer(files)
        return tokenizer if tokenizer.folder == folder else replace(tokenizer, folder=folder)

    @property
    def bos_ids(self) -> list[int]:
        """The ids that a text begins with: bos_id, or none."""
        return [] if self.bos_id is None else [self.bos_id]

    @property
    def dropout_note(self) -> list[str]:
        """Return a line that says that BPE dropout is switched off, if the tokenizer has it."""
        message = f"{self.folder}/tokenizer.json has dropout {self.dropout}, which splits a text in another way each time: it is switched off"
        return [message] if self.dropout else []

    def notes(self, of_texts: bool) -> list[str]:
        """Return what is done otherwise than the files say, and how tokens that the tokenizer lacks are handled, one
        line each; conversations begin as their template says.
        """
        notes = self.dropout_note
        if of_texts and self.bos_id is None:
            notes.append("the tokenizer has no bos_token: texts begin without one")
        unknown_id = self._full.token_to_id(self.named_tokens.get("unk_token", ""))
        with suppress(UserError):
            if unknown_id in self.encode(RARE_TEXT):
                notes.append(f"texts that the tokenizer has no tokens for become {self.named_tokens['unk_token']}")
        if "pad_token" not in self.named_tokens:
            notes.append(
                f"the tokenizer has no pad_token: batches are padded with its eos_token {self.named_tokens['eos_token']}, without loss and attention"
            )
        return notes

    @cached_property
    def tokens_fingerprint(self) -> str:
        """sha256 of what decides the ids of a text: vocabulary, merges, normalizer, pre_tokenizer and added tokens.
        File formats do not change it.
        """
        stored = json.loads(self._full.to_str())
        model = {
            key: value
            for key, value in stored["model"].items()
            if value not in (None, False, "") and not (key == "vocab" and isinstance(value, dict))
        }
        added = sorted(token["content"] for token in stored["added_tokens"])
        parts = [model, self.token_ids(), added, stored["normalizer"], stored["pre_tokenizer"]]
        return sha256_of_json(parts)

    def token_ids(self) -> dict[str, int]:
        """Return the id of every token, added tokens included."""
        return self._full.get_vocab(with_added_tokens=True)

    @property
    def largest_text_id(self) -> int:
        """The largest id that a text can be encoded to; control tokens may have larger ones."""
        return max(self._plain.get_vocab().values())

    def token_kept_by_ignore_merges(self) -> str | None:
        """Return a token that the merges do not make of its own characters; None if there is none: then the model's
        `ignore_merges` changes nothing.
        """
        stored = json.loads(self._full.to_str())
        model = Engine.from_str(json.dumps({**stored, "model": {**stored["model"], "ignore_merges": False}})).model
        return next(
            (
                token
                for token in stored["model"]["vocab"]
                if token not in self.control_ids and len(model.tokenize(token)) != 1
            ),
            None,
        )

    def encode(self, text: str) -> list[int]:
        """Encode plain text: `<|im_end|>` in it becomes ten ordinary characters, not the token."""
        return self.encode_batch([text])[0]

    def encode_rendered(self, text: str, add_special: bool = False) -> list[int]:
        """Encode a text in which control tokens are meant as such, e.g. one that a chat template has rendered.

        add_special: with the tokens that the post-processor of tokenizer.json adds, e.g. a bos_token in front.
        """
        return self._full.encode(text, add_special_tokens=add_special).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError:  # rows with such a text are refused before
            message = "a text has a byte that is not UTF-8, or half of a surrogate pair, which is not a character"
            fix = "correct the text that was typed; if it is correct, the chat template writes it"
            raise UserError(message, f"{self.folder}/{TEMPLATE_FILE}", fix) from None
        except BaseException as error:
            raise _panic_error(error, self.folder) from None

    def encode_to_bytes(self, texts: list[str]) -> list[bytes]:
        """Return the ids of `encode_batch`, as bytes of int32."""
        return bytes_of_ids(self.encode_batch(texts))

    def caching_encoder(self) -> BytesEncoder:
        """Return `encode_to_bytes` with a cache of pieces of texts, for one thread; without one if it is not certain
        that it gives the same ids.
        """
        return PieceCache(self._cuts, self.encode_to_bytes).encode if self._cuts else self.encode_to_bytes

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return self._full.decode(list(ids), skip_special_tokens=skip_special)


@lru_cache(maxsize=2)  # the checks, the data pipeline and the training of a run load the same one
def _build_tokenizer(files: _Files) -> Tokenizer:
    """chat_template.jinja takes precedence over the field chat_template, as in transformers."""
    folder = files.folder
    texts = {
        "tokenizer.json": files.tokenizer,
        TOKENIZER_CONFIG: files.config,
        SPECIAL_TOKENS_MAP: files.special_tokens_map or None,
        GENERATION_CONFIG: files.generation_config or None,
    }
    stored, config, others, generation = (
        {} if text is None else parse_object(text, folder / name) for name, text in texts.items()
    )
    listed = generation.get("eos_token_id")
    with reporting_missing_fields(f"{folder}/tokenizer.json or {TOKENIZER_CONFIG}"):
        if problem := find_problem(stored):
            raise UserError(problem, f"{folder}/tokenizer.json", OTHER_TOKENIZER_HINT)
        dropout = stored["model"].get("dropout") or 0.0
        if dropout:
            stored["model"]["dropout"] = None  # as in a tokenizer without: same ids, same fingerprint
        # Without this setting the library warns whenever a loader forks its workers. Its threads are idle then.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        full = _build_engine(stored, folder)
        named = _named_tokens(config, others, full)
        added = stored["added_tokens"]
        control_ids = _control_ids(added, named)
        without_control = _without_control_tokens(stored, set(control_ids))
        plain = _build_engine(without_control, folder)
        before = {name: stored.get(name) for name in SECTIONS[:2]}
        inner = json.loads(json.dumps(before), object_hook=lambda part: part | NO_SPACE.get(part.get("type"), {}))
        eos_id = _token_id(full, named, "eos_token", folder)
        bos_id = _token_id(full, named, "bos_token", folder) if "bos_token" in named else None
        pad_id = _token_id(full, named, "pad_token", folder) if "pad_token" in named else eos_id
        ends = listed if isinstance(listed, list) else [listed]
        template = config.get("chat_template") if files.template is None else files.template
        known_ids = full.get_vocab(with_added_tokens=True).values()
        tokenizer = Tokenizer(
            folder=folder,
            vocab_size=max(full.get_vocab_size(), 1 + max(known_ids)),
            named_tokens=named,
            bos_id=bos_id,
            eos_id=eos_id,
            stop_ids=tuple(sorted({eos_id, *(each for each in ends if isinstance(each, int) and each in known_ids)})),
            pad_id=pad_id,
            control_ids=control_ids,
            special_tokens=frozenset(token["content"] for token in added if token["special"]),
            chat_template=template,
            fingerprint=sha256_of_json([stored, bos_id, eos_id, pad_id, template]),
            dropout=dropout,
            _full=full,
            _plain=plain,
            _cuts=cut_pattern(without_control),
            stripping=frozenset(token["content"] for token in added if token.get("rstrip")),
            inner=None,
            adds_space_after_control='"prepend_scheme": "first"' not in json.dumps(before),
        )
        if inner != before:
            return replace(tokenizer, inner=replace(tokenizer, _plain=_build_engine(without_control | inner, folder)))
        return tokenizer


def _named_tokens(config: dict, special_tokens_map: dict, engine: Engine) -> dict[str, str]:
    """Return bos_token, eos_token, ... as far as the files name them.

    `null` in tokenizer_config.json means that there is none.
    """
    tokens = {key: config[key] if key in config else special_tokens_map.get(key) for key in NAMED_TOKENS}
    named = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items() if token}
    if not named and not any(key in config for key in NAMED_TOKENS) and engine.token_to_id(GPT2_TOKEN) is not None:
        return dict.fromkeys(("bos_token", "eos_token", "unk_token"), GPT2_TOKEN)
    return named


def _control_ids(added: list[dict], named: dict[str, str]) -> dict[str, int]:
    """Return the id of each added token but pieces of text: terms, or runs of spaces or newlines, as in the tokenizers
    of Gemma and GPT-NeoX.
    """
    return {
        token["content"]: token["id"]
        for token in added
        if token["special"] or token["content"].strip() in named.values() or not TEXT.fullmatch(token["content"])
    }


def _without_control_tokens(stored: dict, control: set[str]) -> dict:
    """Return the same model without control tokens: no text is encoded to one, and no merge makes one, because merges
    of and to control tokens are left out. Only the unknown token stays, for what the vocabulary lacks.
    """
    model, added = stored["model"], stored["added_tokens"]
    texts = [token for token in added if token["content"] not in control]
    # those that are no part of the vocabulary would get other ids
    changed: dict[str, Any] = {}
    if model["type"] == "Unigram":  # the id of a piece is its position: a control token becomes what no text has
        known, name = {piece for piece, _ in model["vocab"]}, secrets.token_hex(16)
        pieces = [*model["vocab"], *([token["content"], 0.0] for token in added if token["content"] not in known)]
        changed["vocab"] = [
            [f"{name}{i}" if text in control else text, score] for i, (text, score) in enumerate(pieces)
        ]
    else:
        hidden = control - {model.get("unk_token")}
        changed["vocab"] = {token: i for token, i in model["vocab"].items() if token not in hidden}
        changed["vocab"] |= {token["content"]: token["id"] for token in texts}
    if "merges" in model:
        parts = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
        changed["merges"] = [merge for merge, (left, right) in parts if control.isdisjoint((left, right, left + right))]
    return {**stored, "added_tokens": texts, "post_processor": None, "model": {**model, **changed}}


def _build_engine(stored: dict, folder: Path) -> Engine:
    try:
        engine = Engine.from_str(json.dumps(stored))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"the tokenizer cannot be loaded: {error}", f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT
        ) from error
    except BaseException as error:
        raise _panic_error(error, folder) from None
    engine.no_truncation()
    engine.no_padding()
    return engine


def _token_id(engine: Engine, named: dict[str, str], key: str, folder: Path) -> int:
    token_id = engine.token_to_id(named.get(key, ""))
    if token_id is None:
        problem = f"{key} {named[key]} is none of its tokens" if key in named else f"the tokenizer has no {key}"
        raise UserError(
            problem,
            f"{folder}/{TOKENIZER_CONFIG}",
            f"set {key} there to one of its tokens, or {TRAIN_TOKENIZER_HINT}",
        )
    return token_id


def _read_text(path: Path) -> str:
    try:
        # as a text file
        return read_source_file(path, MAX_TOKENIZER_BYTES).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise UserError(
            "a file of the tokenizer is missing", path, f"copy it there, name another folder, or {TRAIN_TOKENIZER_HINT}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {error}", path, DOWNLOAD_HINT) from error


def _panic_error(error: BaseException, folder: Path) -> BaseException:
    """Return a UserError for an error of the library (a text that the model has no token for) or a panic, which is no
    Exception (a regular expression that gave up). Else `error`.
    """
    if type(error).__name__ not in ("PanicException", "Exception"):
        return error
    return UserError(f"the tokenizer fails: {str(error)[:200]}", f"{folder}/tokenizer.json", TRAIN_TOKENIZER_HINT)
