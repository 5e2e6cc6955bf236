"""Hostile tokenizer.json files are refused by name, within seconds, before a text is encoded."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data.tokenize import tokenizer_limits
from data.tokenize.origin import SAMPLE_TOKENIZER
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.tokenizer_limits import KNOWN_PATTERNS, MAX_ADDED_TOKENS, MAX_TOKEN_ID

Change = Callable[[dict[str, Any]], object]


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def with_split(pattern: str) -> Change:
    return lambda stored: stored["pre_tokenizer"]["pretokenizers"].insert(0, split(pattern))


def normalized(*parts: dict[str, Any]) -> Change:
    return lambda stored: stored.update(normalizer={"type": "Sequence", "normalizers": list(parts)})


def charsmap(text: bytes) -> dict[str, Any]:
    """A normalizer with an empty trie of 256 nodes, whose texts are `text`."""
    content = (1024).to_bytes(4, "little") + bytes(1024) + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def unigram(pieces: list[Any], **of_token: Any) -> Change:
    model = {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}
    return lambda stored: stored.update(model=model) or stored["added_tokens"][0].update(of_token)


def word_piece(longest: Any) -> Change:
    model = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0}}
    # language: allow word
    return lambda stored: stored.update(model=model | {"max_input_chars_per_word": longest})


def write(folder: Path, change: Change) -> Path:
    shutil.copytree(SAMPLE_TOKENIZER, folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    change(stored)
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (normalized(replace("a", "b" * 1000)), "more than 64 times as long"),
        (normalized(*[replace("a", "aaaa")] * 4), "more than 64 times as long"),
        (normalized({"type": "Prepend", "prepend": "x" * 1000}), "more than 64 times as long"),
        (normalized({"prepend": "x" * 1000}), "more than 64 times as long"),
        (normalized({"pattern": {"Regex": "a" * 5000}, "content": "x"}), "at most 4,000 are allowed"),
        (lambda stored: stored.update(normalizer=charsmap(b"Z" * 1000)), "more than 64 times as long"),
        (
            lambda stored: stored.update(decoder={"type": "Sequence", "decoders": [replace("a", "b" * 1000)]}),
            "more than 64 times as long",
        ),
        (normalized(*[{"type": "NFC"}] * 100), "at most 64 are allowed"),
        (with_split("a" * 5000), "at most 4,000 are allowed"),
        (lambda stored: stored["model"]["vocab"].update({"zzz": 2**31}), f"outside of [0, {MAX_TOKEN_ID:,})"),
        (lambda stored: stored["model"]["vocab"].update({"zzz": -1}), "outside of"),
        (lambda stored: stored["model"]["vocab"].update({"zzz": "1"}), "outside of"),
        (lambda stored: stored["added_tokens"].extend([stored["added_tokens"][0]] * MAX_ADDED_TOKENS), "added tokens"),
        (lambda stored: stored["added_tokens"][0].update(content="x" * 2000), "added tokens"),
        (lambda stored: stored.pop("model"), "missing or has another type"),
        (lambda stored: stored.update(added_tokens=None), "missing or has another type"),
        (lambda stored: stored.update(added_tokens=[1]), "missing or has another type"),
        (lambda stored: stored["model"].update(vocab=[]), "missing or has another type"),
        (lambda stored: stored["model"].update(type="Unigram"), "missing or has another type"),
        (lambda stored: stored["model"].update(type="Other"), "must be one of BPE, Unigram, WordPiece, WordLevel"),
        (lambda stored: stored["model"].update(continuing_subword_prefix="#" * 65), "a prefix of the model"),
        (unigram([["a" * 65, 0.0]]), "a piece has more than 64 characters"),
        (unigram([[f"{i:064}", 0.0] for i in range(1 << 16)] + [["a", 0.0]]), "or all have more than 4,194,304 bytes"),
        (unigram([["a", 0.0]], content=" " * 65), "a piece has more than 64 characters"),
        (unigram([]), "the tokenizer cannot be loaded"),
        (unigram([[1, 0.0]]), "missing or has another type"),
        (unigram([["a", "b"]]), "the tokenizer cannot be loaded"),
        (word_piece(101), "WordPiece splits more than 100"),
        (word_piece("9"), "missing or has another type"),
        (lambda stored: stored["model"].update(merges=[1]), "the tokenizer cannot be loaded"),
        (
            lambda stored: stored.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "the tokenizer",
        ),
    ],
)
def test_tokenizer_beyond_the_limits_is_refused(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        Tokenizer.load(write(tmp_path / "tokenizer", change))
    assert message in refused.value.message


@pytest.mark.parametrize("content", ["[]", "3", "[" * 100_000, '{"a": NaN}'], ids=["list", "number", "deep", "NaN"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
def test_tokenizer_file_that_is_no_object_is_refused(name: str, content: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "tokenizer", lambda stored: None)
    (folder / name).write_text(content)
    with pytest.raises(UserError):
        Tokenizer.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(x+x+)+y", r"a+a+a+b", r"(?:\s*\s*)*z", r"("])
def test_regular_expression_that_is_slow_or_wrong_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a regular expression that is not usable"):
        Tokenizer.load(write(tmp_path / "tokenizer", with_split(pattern)))


@pytest.mark.slow
def test_regular_expression_of_public_tokenizers_needs_no_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_limits, "_probe", lambda *_: pytest.fail("a known pattern is probed"))
    expected = Tokenizer.load(SAMPLE_TOKENIZER).encode("the lake of Oru, 1234")
    for number, pattern in enumerate(pattern for pattern in sorted(KNOWN_PATTERNS) if len(pattern) > 40):
        assert Tokenizer.load(write(tmp_path / str(number), with_split(pattern))).encode("a 12 b") or expected


def test_empty_regular_expression_is_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "_probe", lambda stored, patterns: f"probed: {patterns}")
    with pytest.raises(UserError, match="probed: \\(''"):
        Tokenizer.load(write(tmp_path / "tokenizer", with_split("")))


@pytest.mark.slow
def test_unknown_regular_expression_that_is_fast_is_used(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "tokenizer", with_split(r"[aeiou]+|\p{L}|[^\p{L}]+")))
    assert tokenizer.decode(tokenizer.encode("the lake of Oru")) == "the lake of Oru"


def test_map_of_characters_to_short_texts_is_used(tmp_path: Path) -> None:
    assert Tokenizer.load(
        write(tmp_path / "tokenizer", lambda stored: stored.update(normalizer=charsmap(b"fi\0\xef\xac\x80")))
    ).encode("the lake")


@pytest.mark.slow
def test_regular_expression_of_a_decoder_that_is_slow_is_refused(tmp_path: Path) -> None:
    decoder = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    with pytest.raises(UserError, match="a regular expression that is not usable"):
        Tokenizer.load(write(tmp_path / "tokenizer", lambda stored: stored.update(decoder=decoder)))


def test_probe_of_a_large_vocabulary_is_as_fast_as_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []
    monkeypatch.setattr(tokenizer_limits, "_probe", lambda stored, _: probed.append(stored))
    Tokenizer.load(write(tmp_path / "tokenizer", with_split("[ab]")))
    assert len(probed[0]) < 10_000


def test_vocabulary_with_unused_ids_ends_after_the_largest(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(
        write(tmp_path / "tokenizer", lambda stored: stored["model"]["vocab"].update({"\u0120the": 9999}))
    )
    assert tokenizer.encode(" the") == [9999] and (tokenizer.vocab_size, tokenizer.largest_text_id) == (10_000, 9999)


def test_panic_of_the_library_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokenizer_limits, "_probe", lambda *_: None)
    tokenizer = Tokenizer.load(write(tmp_path / "tokenizer", with_split(r"(a+)+b")))
    with pytest.raises(UserError, match="the tokenizer fails"):
        tokenizer.encode("a" * 40 + "c")


def test_text_with_half_a_surrogate_pair_is_a_user_error() -> None:
    with pytest.raises(UserError, match="half of a surrogate pair"):
        Tokenizer.load(SAMPLE_TOKENIZER).encode("\ud800")
