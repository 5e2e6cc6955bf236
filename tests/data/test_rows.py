import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.rows import build_rows


def chat(*turns):
    return {"conversations": [{"role": role, "content": content} for role, content in turns]}


def pair(chosen, rejected, question="?"):
    asked = {"role": "user", "content": question}
    return {"chosen": [asked, {"role": "assistant", "content": chosen}], "rejected": [asked, {"role": "assistant", "content": rejected}]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(texts=st.lists(st.text("ab 你\n1", min_size=1).filter(str.strip), min_size=1, max_size=5), max_length=st.integers(2, 9))
def test_cutting_long_text_predicts_every_token_exactly_once(tokenizer, write, texts, max_length):
    rows = build_rows("text", write([{"text": text} for text in texts]), tokenizer, max_length)
    whole = [[1, *tokenizer.encode(text), 2] for text in texts]
    targets = [(row.name, token) for row in rows for token in row.sequences[0].ids[1:].tolist()]
    assert [token for _, token in targets] == [token for ids in whole for token in ids[1:]]
    assert all(2 <= len(row.sequences[0].ids) <= max_length + 1 for row in rows)
    assert all(not row.sequences[0].learn[0] and row.sequences[0].learn[1:].all() for row in rows)


def test_neighbouring_parts_of_a_text_share_one_token(tokenizer, write):
    rows = build_rows("text", write([{"text": "one two three four five six seven"}]), tokenizer, 3)
    parts = [row.sequences[0].ids for row in rows]
    assert len(parts) > 2 and all(before[-1] == after[0] for before, after in zip(parts, parts[1:], strict=False))


def test_rows_of_a_json_array_are_those_of_the_lines(tokenizer, write):
    data = [{"text": "one"}, {"text": "two"}]
    lines = build_rows("text", write(data), tokenizer, 8)
    array = build_rows("text", write(json.dumps(data, indent=1).encode(), "rows.json"), tokenizer, 8)
    assert np.array_equal(lines.tokens, array.tokens)
    assert lines[1].name.endswith("rows.jsonl:2") and array[1].name.endswith("rows.json[1]")


def test_a_chat_row_is_what_the_template_makes_of_it(tokenizer, template, write):
    data = [chat(("user", "hi"), ("assistant", "hello"), ("user", "2 + 2?"), ("assistant", "4")), chat(("user", "你好"), ("assistant", "好"))]
    for row, source in zip(build_rows("chat", write(data), tokenizer, 100), data, strict=True):
        ids, learn = template.encode(source["conversations"])
        assert row.sequences[0].ids.tolist() == ids and row.sequences[0].learn.tolist() == learn


def test_a_long_chat_is_cut_at_the_length(tokenizer, template, write):
    talk = chat(("user", "hi"), ("assistant", "hello there " * 20))
    row = build_rows("chat", write([talk]), tokenizer, 20)[0]
    assert row.sequences[0].ids.tolist() == template.encode(talk["conversations"])[0][:21]


def test_what_chosen_and_rejected_begin_with_in_common_carries_no_loss(tokenizer, write):
    chosen, rejected = build_rows("preference", write([pair("I like tea.", "I like mud!")]), tokenizer, 100)[0].sequences
    assert [tokenizer.decode(side.ids[side.learn].tolist(), skip_special=False) for side in (chosen, rejected)] == [" tea.<|im_end|>", " mud!<|im_end|>"]


def test_a_rejected_answer_that_goes_on_after_the_chosen_one_differs_from_its_end_on(tokenizer, write):
    chosen, rejected = build_rows("preference", write([pair("Yes", "Yes, no")]), tokenizer, 100)[0].sequences
    assert [tokenizer.decode(side.ids[side.learn].tolist(), skip_special=False) for side in (chosen, rejected)] == ["<|im_end|>", ", no<|im_end|>"]


def test_taking_some_rows_copies_no_token(tokenizer, write):
    rows = build_rows("text", write([{"text": word} for word in ("one", "two", "three")]), tokenizer, 8)
    some = rows.take(np.array([2, 0]))
    assert [row.name for row in some] == [rows[2].name, rows[0].name]
    assert [row.name for row in some.take(np.array([1]))] == [rows[0].name]
    assert some.tokens is rows.tokens


def test_the_fingerprint_follows_everything_that_makes_the_ids(tokenizer, write):
    data = [chat(("user", "a"), ("assistant", "b"))]
    path = write(data)
    prints = [build_rows("chat", path, tokenizer, length).fingerprint for length in (50, 50, 51)]
    other = build_rows("chat", write(data * 2, "other.jsonl"), tokenizer, 50).fingerprint
    assert prints[0] == prints[1] and len({*prints, other}) == 3


@pytest.mark.parametrize(
    "shape, row, max_length, message",
    [
        ("chat", chat(("user", "hi")), 50, "no assistant turn"),
        ("chat", chat(("user", "far too long " * 20), ("assistant", "hi")), 20, "nothing to learn is left"),
        ("preference", pair("same", "same"), 50, "do not differ"),
        ("preference", pair("a b c d e f g h", "a b c d e f g z"), 12, "do not differ within 12"),
        ("preference", pair("a", "b", question="long " * 30), 20, "nothing to learn is left"),
    ],
)
def test_a_row_with_nothing_to_learn_is_refused_by_name(tokenizer, write, shape, row, max_length, message):
    good = chat(("user", "hi"), ("assistant", "ho")) if shape == "chat" else pair("a", "b")
    with pytest.raises(ValueError, match=message) as refusal:
        build_rows(shape, write([good, row]), tokenizer, max_length)
    what, where, fix = refusal.value.args
    assert where.endswith("rows.jsonl:2") and fix
