"""Equal tokens for jobs whose rows differ in length, or a refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import UserError
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.sweep import budget

PACKED = ["data.packing=best_fit", "train.batch_size=4", "train.accumulation_steps=1", "train.max_steps=100"]


@pytest.fixture(scope="module")
def text() -> Config:
    return compose_config(PACKED)


def with_data(config: Config, **values: Any) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **values))


def test_budget_of_packed_rows_counts_tokens_not_rows(text: Config) -> None:
    short, long = with_data(text, max_length=64), with_data(text, max_length=128)
    base = budget.smallest_step([short, long])
    assert base == budget.StepSize(4, 4 * 64)
    assert budget.matching_overrides(short, base, ["data.max_length"]) == {}
    assert budget.matching_overrides(long, base, ["data.max_length"])["train.max_steps"] == "50"


def test_step_of_preference_pairs_has_two_sequences_per_row() -> None:
    pairs = with_data(compose_config(["stage=dpo", *PACKED]), max_length=64)
    assert budget.step_size(pairs) == budget.StepSize(4, 4 * 64 * 2)


def test_budget_of_tokens_is_refused_where_rows_have_any_length(text: Config) -> None:
    swept = ["data.max_length"]
    packed = [with_data(text, max_length=length) for length in (64, 128)]
    budget.check_countable(packed, "tokens", swept)
    with pytest.raises(UserError, match="data.max_length differs and data.packing=none"):
        budget.check_countable([with_data(config, packing="none") for config in packed], "tokens", swept)
