"""How many bytes of text each token stands for: losses of different tokenizers are comparable per byte."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from common.guarded_files import MAX_TOKENIZER_BYTES, read_source_file
from common.limits.parsers import parse_json

if TYPE_CHECKING:
    from data.batching.batch import Batch
    from data.tokenize.tokenizer import Tokenizer

SPACE = "\u2581"  # how tokenizers without byte-level pre-tokenization write a space
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")  # byte fallback: one byte of a character that is not in the vocabulary


class TokenBytes:
    """Counts the UTF-8 bytes of the tokens with a label.

    Special tokens, also the end of a text, have none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        stored = parse_json(read_source_file(tokenizer.folder / "tokenizer.json", MAX_TOKENIZER_BYTES))
        is_byte_level = _has_type(stored["pre_tokenizer"], "ByteLevel")  # one character of a token per byte
        has_byte_tokens = bool(stored["model"].get("byte_fallback"))
        self._bos_id = tokenizer.bos_id
        token_ids = tokenizer.token_ids()
        self._counts = np.zeros(max(token_ids.values()) + 1, np.int64)  # (V,) bytes of each token
        self._starts_with_space = np.zeros(len(self._counts), bool)
        for token, i in token_ids.items():
            if token in tokenizer.control_ids:
                size = 0 if token in tokenizer.special_tokens else len(token.encode())
            elif is_byte_level:
                size = len(token)
            else:
                size = 1 if has_byte_tokens and BYTE_TOKEN.fullmatch(token) else len(token.replace(SPACE, " ").encode())
                self._starts_with_space[i] = token.startswith(SPACE)
            self._counts[i] = size
        # SentencePiece's tokenizers put a space before a text, which is no byte of it.
        self._adds_space = _has_type(stored["normalizer"], "Prepend") or _prepends(stored["pre_tokenizer"])

    def count(self, batch: Batch) -> float:
        """Return the number of bytes of the tokens with a label, each times its weight in the loss."""
        labels, inputs = batch.labels.cpu().numpy(), batch.input_ids.cpu().numpy()
        has_label = labels >= 0
        sizes = self._counts[labels[has_label]]
        if self._adds_space and self._bos_id is not None:
            sizes = sizes - self._starts_with_space[labels[has_label]] * (inputs[has_label] == self._bos_id)
        return float(
            sizes.sum()
            if batch.loss_weights is None
            else sizes @ batch.loss_weights.cpu().numpy()[has_label].astype(float)
        )


def _has_type(part: Any, name: str) -> bool:
    """Return whether a component of tokenizer.json, or one inside of it, has this type."""
    if isinstance(part, list):
        return any(_has_type(inner, name) for inner in part)
    return isinstance(part, dict) and (
        part.get("type") == name or any(_has_type(inner, name) for inner in part.values())
    )


def _prepends(pre_tokenizer: Any) -> bool:
    return _has_type(pre_tokenizer, "Metaspace") and '"prepend_scheme": "never"' not in json.dumps(pre_tokenizer)
