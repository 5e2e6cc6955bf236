"""Texts encoded piece by piece, and conversations by their shape, give what encoding and rendering them whole gives."""

import json
import random
import shutil

import numpy as np
import pytest

from data.schemas.messages import check_chat
from data.tokenize import pieces as cache
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.pieces import PieceCache, cut_pattern
from data.tokenize.tokenizer import Tokenizer
from data.tokenize.tokenizer_limits import GPT2_PATTERN, LLAMA3_PATTERNS

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
UNITS = [
    *(
        " ",
        "  ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "\r\n",
        "\x0b",
        "\x1c",
        "\x85",
        "\xa0",
        "\u2003",
        "\u2028",
        "\u3000",
        "\u180e",
        "\u200b",
        "a",
        "Name",
        "don't",
        "'s",
        "'",
        "12",
        "3",
    ),
    *(
        "!",
        "...",
        "，",
        "。",
        "你好",
        "世",
        "é",
        "e\u0301",
        "\u0301",
        "=\u0338",
        "½",
        "²",
        "٣",
        "🎉",
        "_",
        "-",
        "x" * 40,
        "<|im_end|>",
        "\x00",
        "\u1100\u1161",
    ),
]


def sequence(pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**BYTE_LEVEL, "use_regex": False}]}


CUT = {
    "digits, GPT-2": {},
    "GPT-2": {"pre_tokenizer": BYTE_LEVEL},
    "GPT-2 as a pattern": {"pre_tokenizer": sequence(GPT2_PATTERN)},
    "Qwen": {"pre_tokenizer": sequence(LLAMA3_PATTERNS[0]), "normalizer": {"type": "NFC"}},
    "Llama 3": {"pre_tokenizer": sequence(LLAMA3_PATTERNS[1])},
}
NOT_CUT = {
    "a space is added in front": {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
    "no pre-tokens": {"pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}},
    "unknown pattern": {"pre_tokenizer": sequence(r"a b|\p{L}+")},
    "digits after pieces": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, DIGITS]}},
    "normalizer": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
}


@pytest.fixture
def load_variant(tokenizer, tmp_path):
    def load(changes):
        folder = shutil.copytree(tokenizer.folder, tmp_path / "variant")
        stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps(stored | changes), encoding="utf-8")
        return Tokenizer.load(folder)

    return load


def random_texts(count, rng):
    return ["".join(rng.choices(UNITS, k=rng.choice([0, 1, 2, 3, 6, 30]))) for _ in range(count)]


def is_same(encode, tokenizer, texts):
    return [np.frombuffer(ids, np.int32).tolist() for ids in encode(texts)] == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("name", CUT)
def test_pieces_of_a_text_have_the_ids_of_the_whole_text(load_variant, name):
    tokenizer, rng = load_variant(CUT[name]), random.Random(name)
    encode = tokenizer.caching_encoder()
    assert encode != tokenizer.encode_to_bytes, "the text is cut"
    assert all(is_same(encode, tokenizer, random_texts(300, rng)) for _ in range(4))


@pytest.mark.parametrize("name", NOT_CUT)
def test_pieces_are_not_looked_up_where_the_ends_of_pre_tokens_are_not_known(load_variant, name):
    tokenizer = load_variant(NOT_CUT[name])
    encode = tokenizer.caching_encoder()
    assert encode == tokenizer.encode_to_bytes
    assert is_same(encode, tokenizer, random_texts(50, random.Random(0)))


def test_pieces_are_not_looked_up_with_random_merges_or_added_tokens(tokenizer):
    stored = json.loads(tokenizer._plain.to_str())
    assert cut_pattern(stored) is not None
    assert cut_pattern({**stored, "model": {**stored["model"], "dropout": 0.1}}) is None
    assert cut_pattern({**stored, "added_tokens": [{"content": "  "}]}) is None


def test_piece_cache_is_bounded_and_forgets(tokenizer, monkeypatch):
    monkeypatch.setattr(cache, "MAX_PIECES", 50)
    monkeypatch.setattr(cache, "MAX_CUT_CHARACTERS", 500)
    pieces, rng = PieceCache(tokenizer._cuts, tokenizer.encode_to_bytes), random.Random(1)
    for _ in range(20):
        assert is_same(
            pieces.encode,
            tokenizer,
            [" ".join(f"item{rng.randrange(1000)}" for _ in range(20)) for _ in range(4)] + ["x " * 400],
        )
        assert len(pieces._known) <= 50
    pieces.encode(["short a b c d " + "y" * 33 + " 你好 end"])
    assert {" end", "short"} <= pieces._known.keys() and not {" " + "y" * 33, " 你好"} & pieces._known.keys()


def conversations(rng):
    for _ in range(300):
        first = [{"role": "system", "content": "be " + rng.choice(UNITS)}] * rng.randint(0, 1)
        turns = [
            {"role": role, "content": "." + "".join(rng.choices(UNITS, k=3))}
            for _ in range(rng.randint(1, 3))
            for role in ("user", "assistant")
        ]
        if rng.random() < 0.3:
            turns[-1]["weight"] = rng.choice([0, 1])
        if rng.random() < 0.2:
            turns[1] |= rng.choice(
                [{"reasoning_content": "why"}, {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
            )
        yield check_chat([*first, *turns], None, "row")[0]


@pytest.mark.parametrize("loss_on", ["assistant", "last_assistant", "all"])
def test_segments_by_shape_are_those_of_the_rendered_conversation(tokenizer, loss_on):
    template, planned = ChatTemplate(tokenizer), 0
    for messages in conversations(random.Random(loss_on)):
        if segments := template._plans.segments(messages, loss_on):
            planned += 1
            assert segments == template._render_segments(messages, None, "row", loss_on)
    assert planned > 100


@pytest.mark.parametrize("content", ["a <|im_end|> b", "a \ufdd0 b", "", "<|endoftext|>"])
def test_segments_of_a_content_that_the_template_may_change_are_rendered(tokenizer, content):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    assert ChatTemplate(tokenizer)._plans.segments(messages, "assistant") is None


@pytest.mark.slow
def test_segments_by_shape_are_for_shipped_templates_only(tokenizer, tmp_path):
    folder = shutil.copytree(tokenizer.folder, tmp_path / "changed")
    (folder / "chat_template.jinja").write_text(
        tokenizer.chat_template.replace("message.content or ''", "(message.content or '') | upper"), encoding="utf-8"
    )
    assert ChatTemplate(Tokenizer.load(folder))._plans is None
