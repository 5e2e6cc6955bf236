"""data.turns: conversations in which one role has several messages in a row, or the assistant begins."""

from dataclasses import replace

import numpy as np
import pytest

from data.batching.mixture import MixedRows, WeightedSource
from data.schemas.registry import SCHEMAS
from data.sources.files import ReadOptions, Source
from data.store.cache import load_or_build
from data.types import BadRowError, EncodingConfig

CALL = {"tool_calls": [{"name": "f", "arguments": {}}]}
TURNS = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def messages(*turns):
    """Return messages from (role's first letter and content, other fields)."""
    turns = [turn if isinstance(turn, tuple) else (turn, {}) for turn in turns]
    return [{"role": TURNS[text[0]], "content": text, **fields} for text, fields in turns]


def read(turns, *row):
    return SCHEMAS["openai messages"].read({"messages": messages(*row)}, "rows.jsonl:1", turns).messages


def contents(read_messages):
    return [message["content"] for message in read_messages]


@pytest.mark.parametrize(
    "row, merged",
    [
        (["u1", "u2", "a1"], ["u1\n\nu2", "a1"]),
        (["u1", "a1", "a2", "a3", "u2", "u3"], ["u1", "a1\n\na2\n\na3", "u2\n\nu3"]),
        (["s1", "s2", "u1", "a1"], ["s1\n\ns2", "u1", "a1"]),
        (["a1", "u1", "a2"], ["a1", "u1", "a2"]),
        (["s1", "a1", "a2", "u1"], ["s1", "a1\n\na2", "u1"]),
        (["u1", ("a1", {"reasoning_content": "why"}), "a2"], ["u1", "a1\n\na2"]),
        (["u1", ("a1", {"content": "", "reasoning_content": "why"}), "a2"], ["u1", "a2"]),
        (["u1", ("a1", {"weight": 0.5}), ("a2", {"weight": 0.5})], ["u1", "a1\n\na2"]),
    ],
)
def test_turns_of_one_role_are_joined_by_a_blank_line(row, merged):
    turns = read("merge", *row)
    assert contents(turns) == merged
    assert [turn.get("weight") for turn in turns if "weight" in turn] == [0.5] * ("weight" in str(row))
    assert [turn["reasoning_content"] for turn in turns if turn["reasoning_content"]] == ["why"] * ("why" in str(row))
    with pytest.raises(BadRowError, match="roles out of order") as error:
        read("strict", *row)
    assert error.value.fix.startswith("data.turns=merge or delete messages: allowed here is ")


@pytest.mark.parametrize(
    "row",
    [["s1", "u1", "a1", ("a2", CALL), "t1", "t2", "a3", "u2"], ["u1", "a1"], [("s ", {"content": " "}), "u1", "a1"]],
)
def test_turns_in_order_are_read_as_without_the_setting(row):
    assert read("merge", *row) == read("strict", *row)


@pytest.mark.parametrize(
    "row, problem",
    [
        (["u1", ("a1", CALL), "a2"], "assistant after assistant, which differ in tool_calls"),
        (["u1", ("a1", {"weight": 0}), "a2"], "assistant after assistant, which differ in weight"),
        (["u1", "a1", ("a2", {"weight": 0})], "assistant after assistant, which differ in weight"),
        (["u1", "a1", ("a2", {"reasoning_content": "x"})], "assistant after assistant, which differ in reasoning_content"),
        ([("u1", {"name": "Ann"}), ("u2", {"name": "Bob"}), "a1"], "user after user, which differ in name"),
        (["u1", "s1", "a1"], "system after user"),
        (["u1", "t1", "a1"], "tool after user"),
    ],
)  # fmt: skip
def test_turns_that_cannot_be_one_are_refused_with_the_reason(row, problem):
    for turns in ("strict", "merge"):
        with pytest.raises(BadRowError, match="roles out of order") as error:
            read(turns, *row)
        assert error.value.message == f"roles out of order: {problem}" and "data.turns" not in error.value.fix


def test_turns_of_a_prompt_and_its_answers_are_joined():
    row = {"prompt": "u1", "chosen": messages("u2", "a1"), "rejected": messages("u2", "a2", "a3")}
    pair = SCHEMAS["trl preference"].read(row, "rows.jsonl:1", "merge")
    assert contents(pair.chosen.messages) == ["u1\n\nu2", "a1"]
    assert contents(pair.rejected.messages) == ["u1\n\nu2", "a2\n\na3"]


def test_merged_turns_have_loss_as_one_answer_and_a_store_of_their_own(write, tokenizer, template, tmp_path):
    good = {"messages": messages("u1", "a1")}
    path = write([{"messages": messages("a0", "u1", "u2", "a1", "a2")}, good])
    strict, merge = (Source.open(path, ReadOptions(turns=turns)) for turns in ("strict", "merge"))
    encoding = EncodingConfig("chat", "openai messages", tokenizer.folder, 64, "truncate", "assistant", "error")

    def store(source, **changes):
        return load_or_build(source, replace(encoding, **changes), tokenizer, tmp_path / "cache")

    sequence = MixedRows((WeightedSource(merge, store(merge)),))[0].sequences[0]
    lost = np.flatnonzero(np.diff(sequence.loss_mask.astype(int), append=0) == -1)
    begins = np.flatnonzero(np.diff(sequence.loss_mask.astype(int), prepend=0) == 1)
    spans = [tokenizer.decode(sequence.ids[a : b + 1], skip_special=False) for a, b in zip(begins, lost, strict=True)]
    assert spans == ["a0<|im_end|>", "a1\n\na2<|im_end|>"]
    assert tokenizer.decode(sequence.ids, skip_special=False).count("<|im_start|>") == 3
    with pytest.raises(BadRowError, match="assistant comes first"):
        store(strict)
    skipped, merged = (store(source, on_bad_row="skip").stats for source in (strict, merge))
    assert (skipped.kept, merged.kept) == (1, 2)
    # files that were read before this setting existed keep their identity
    assert strict.reading == ["jsonl", "utf-8", ()] and merge.reading == [*strict.reading, "merge"]
