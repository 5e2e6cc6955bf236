import random

import numpy as np
import pytest

from data.schemas.augment import EMPTY_THINK, augment_row
from data.schemas.schemas import ChatExample, PreferencePair

PROMPTS = ("Be brief.", "Be kind.", "你是助手。")
USER = {"role": "user", "content": "2 + 2?"}
CHAT = ChatExample([USER, {"role": "assistant", "content": "4"}], None)


def many(row, system_prob, empty_think_prob, seed=1, rows=2000):
    return [augment_row(row, system_prob, PROMPTS, empty_think_prob, seed, identity) for identity in range(rows)]


def test_off_is_the_very_row():
    assert augment_row(CHAT, 0.0, (), 0.0, 1, 7) is CHAT


def test_certain_options_change_every_row():
    changed = many(CHAT, 1.0, 1.0)
    assert {row.messages[0]["role"] for row in changed} == {"system"}
    assert {row.messages[0]["content"] for row in changed} == set(PROMPTS)
    assert {row.messages[2]["content"] for row in changed} == {EMPTY_THINK + "4"}


def test_a_probability_is_the_share_of_rows():
    changed = many(CHAT, 0.2, 0.1)
    assert 0.15 < np.mean([len(row.messages) == 3 for row in changed]) < 0.25
    assert 0.07 < np.mean([row.messages[-1]["content"] != "4" for row in changed]) < 0.13


def test_what_is_drawn_depends_on_seed_and_row_alone():
    before = many(CHAT, 0.5, 0.5)
    random.seed(3)
    np.random.seed(3)
    state = np.random.get_state()[1].tolist()
    assert many(CHAT, 0.5, 0.5)[::-1] == before[::-1] != many(CHAT, 0.5, 0.5, seed=2)
    assert np.random.get_state()[1].tolist() == state


def test_one_option_does_not_move_the_draws_of_the_other():
    both, one = many(CHAT, 0.5, 0.5), many(CHAT, 0.5, 0.0)
    assert [len(row.messages) for row in both] == [len(row.messages) for row in one]


def test_the_row_that_was_given_is_left_alone():
    many(CHAT, 1.0, 1.0, rows=1)
    assert CHAT == ChatExample([USER, {"role": "assistant", "content": "4"}], None)


@pytest.mark.parametrize("chat", [ChatExample([{"role": "system", "content": "Mine."}, *CHAT.messages], None), ChatExample(CHAT.messages, [{"name": "f"}])])
def test_a_system_message_or_tools_are_not_talked_over(chat):
    assert augment_row(chat, 1.0, PROMPTS, 0.0, 1, 0) == chat


@pytest.mark.parametrize(
    "answer", [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}, {"role": "assistant", "content": "<think>hm</think>4"}]
)
def test_an_answer_with_reasoning_keeps_it(answer):
    chat = ChatExample([USER, answer], None)
    assert augment_row(chat, 0.0, (), 1.0, 1, 0) == chat


def test_both_sides_of_a_pair_get_the_same():
    pair = PreferencePair(CHAT, ChatExample([USER, {"role": "assistant", "content": "5"}], None))
    for row in many(pair, 0.5, 0.5, rows=200):
        assert row.chosen.messages[:-1] == row.rejected.messages[:-1]
        assert row.chosen.messages[-1]["content"][:-1] == row.rejected.messages[-1]["content"][:-1]
