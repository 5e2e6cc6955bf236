"""Bytes of the tokens with a label, against the bytes of the text they come from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers

from data.batching.batch import Batch, collate
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodedRow, TokenSequence
from runner.inference.metrics import TokenBytes

SHIPPED = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
TEXTS = ["plain", "托洛最喜欢棕色。", "é 🙂 a  b", "<|im_end|> is text", "\x00\t\n", "naïve café"]


def byte_fallback_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer as Llama 2 has: a space is U+2581 and is put before a text; unknown characters are byte tokens."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghilnoprstvx",
        "pl",
        "la",
        "\u2581p",
    ]
    engine = Engine(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("p", "l"), ("l", "a"), ("\u2581", "p")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    engine.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})
    )
    return Tokenizer.load(folder)


@pytest.fixture(params=["byte-level", "byte fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(SHIPPED) if request.param == "byte-level" else byte_fallback_tokenizer(tmp_path / "tokenizer")


def batch_of(tokenizer: Tokenizer, texts: list[str], packed: bool = False) -> Batch:
    rows = []
    for text in texts:
        ids = np.array([*tokenizer.bos_ids, *tokenizer.encode(text), tokenizer.eos_id], np.int32)
        rows.append(EncodedRow((TokenSequence(ids, np.arange(len(ids)) > 0),), text))
    return collate([rows] if packed else [[row] for row in rows], tokenizer.pad_id, packed)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_of_a_text_are_its_utf8_bytes(tokenizer: Tokenizer, text: str) -> None:
    assert TokenBytes(tokenizer).count(batch_of(tokenizer, [text])) == len(text.encode())


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_of_a_batch_are_those_of_its_texts(tokenizer: Tokenizer, packed: bool) -> None:
    assert TokenBytes(tokenizer).count(batch_of(tokenizer, TEXTS, packed)) == sum(len(text.encode()) for text in TEXTS)


def test_bytes_count_exactly_the_tokens_with_a_label() -> None:
    tokenizer = Tokenizer.load(SHIPPED)
    first, second = tokenizer.encode("What is 你好? "), tokenizer.encode("An answer, é 🙂.")
    ids = np.array([tokenizer.bos_id, *first, *second, tokenizer.eos_id], np.int32)
    loss_mask = np.arange(len(ids)) > len(first)
    batch = collate([[EncodedRow((TokenSequence(ids, loss_mask),), "row")]], tokenizer.pad_id, packed=False)
    assert TokenBytes(tokenizer).count(batch) == len("An answer, é 🙂.".encode())


def test_bytes_of_tokens_without_their_spaces_are_not_known(tmp_path: Path) -> None:
    """`bits_per_byte` of WordPiece and WordLevel is left out: it counted ## as two bytes, and spaces as none."""
    vocab = {"<unk>": 0, "</s>": 1, "pla": 2, "##in": 3, "plain": 4}
    for model in (models.WordPiece(vocab, unk_token="<unk>"), models.WordLevel(vocab, unk_token="<unk>")):
        Engine(model).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        tokenizer = Tokenizer.load(tmp_path)
        assert TokenBytes(tokenizer).count(batch_of(tokenizer, ["plain"])) == 0
