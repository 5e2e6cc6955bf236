"""Random changes of conversations: system messages and empty think blocks."""

import random
from dataclasses import replace

import numpy as np
import pytest

from data.schemas.chat import EMPTY_THINK, augment_example
from data.schemas.registry import ChatExample, PreferencePair
from data.types import EncodingConfig

PROMPTS = ("Be brief.", "Be kind.", "你是助手。")
USER = {"role": "user", "content": "2 + 2?"}
CHAT = ChatExample([USER, {"role": "assistant", "content": "4"}], None)


def encoding(system_prob, empty_think_prob, seed=1):
    fixed = EncodingConfig("chat", "openai messages", None, 512, "truncate", "assistant", "error")
    prompts = PROMPTS if system_prob else ()
    return replace(fixed, system_prompts=prompts, system_prob=system_prob, empty_think_prob=empty_think_prob, seed=seed)


def augment_many(example, system_prob, empty_think_prob, seed=1, count=2000):
    settings = encoding(system_prob, empty_think_prob, seed)
    return [augment_example(example, settings, index) for index in range(count)]


def test_augment_with_probability_0_returns_the_same_object():
    assert augment_example(CHAT, encoding(0.0, 0.0), 7) is CHAT


def test_augment_with_probability_1_changes_every_example():
    changed = augment_many(CHAT, 1.0, 1.0)
    assert {example.messages[0]["role"] for example in changed} == {"system"}
    assert {example.messages[0]["content"] for example in changed} == set(PROMPTS)
    assert {example.messages[2]["content"] for example in changed} == {EMPTY_THINK + "4"}


def test_augment_probability_is_the_fraction_of_changed_examples():
    changed = augment_many(CHAT, 0.2, 0.1)
    assert 0.15 < np.mean([len(example.messages) == 3 for example in changed]) < 0.25
    assert 0.07 < np.mean([example.messages[-1]["content"] != "4" for example in changed]) < 0.13


def test_augment_depends_on_seed_and_index_only():
    before = augment_many(CHAT, 0.5, 0.5)
    random.seed(3)
    np.random.seed(3)
    state = np.random.get_state()[1].tolist()
    assert augment_many(CHAT, 0.5, 0.5)[::-1] == before[::-1] != augment_many(CHAT, 0.5, 0.5, seed=2)
    assert np.random.get_state()[1].tolist() == state


def test_augment_draws_of_one_option_do_not_depend_on_the_other():
    both, one = augment_many(CHAT, 0.5, 0.5), augment_many(CHAT, 0.5, 0.0)
    assert [len(example.messages) for example in both] == [len(example.messages) for example in one]


def test_augment_does_not_modify_its_argument():
    augment_many(CHAT, 1.0, 1.0, count=1)
    assert CHAT == ChatExample([USER, {"role": "assistant", "content": "4"}], None)


@pytest.mark.parametrize(
    "chat",
    [
        ChatExample([{"role": "system", "content": "Mine."}, *CHAT.messages], None),
        ChatExample(CHAT.messages, [{"name": "f"}]),
    ],
)
def test_augment_adds_no_system_message_beside_another_or_tools(chat):
    assert augment_example(chat, encoding(1.0, 0.0), 0) == chat


@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"},
        {"role": "assistant", "content": "<think>hm</think>4"},
    ],
)
def test_augment_keeps_an_answer_with_reasoning(answer):
    chat = ChatExample([USER, answer], None)
    assert augment_example(chat, encoding(0.0, 1.0), 0) == chat


def test_augment_changes_chosen_and_rejected_alike():
    pair = PreferencePair(CHAT, ChatExample([USER, {"role": "assistant", "content": "5"}], None))
    for example in augment_many(pair, 0.5, 0.5, count=200):
        assert example.chosen.messages[:-1] == example.rejected.messages[:-1]
        assert example.chosen.messages[-1]["content"][:-1] == example.rejected.messages[-1]["content"][:-1]
