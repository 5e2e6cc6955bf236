from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.batching.mixture import HoldoutSplit, MixedRows, WeightedSource, mix_sources
from data.types import TokenSequence


class FakeStore:
    """Row i has 10 + i input tokens, all with the id i."""

    def __init__(self, size: int, weights: list[float] | None = None) -> None:
        self.size, self._weights, self.has_weights, self.digest = size, weights, weights is not None, f"store of {size}"

    def __len__(self) -> int:
        return self.size

    def read(self, i: int):
        return [TokenSequence(np.full(11 + i, i, np.int32), np.ones(11 + i, bool))], i + 1

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return np.arange(10 + start, 10 + stop)

    def column(self, name: str, start: int, stop: int) -> np.ndarray:
        assert name == "weight"
        return np.array(self._weights[start:stop], np.float32)


class FakeSource:
    path = Path("rows.jsonl")

    def where(self, position: int) -> str:
        return f"{self.path}:{position}"


def source(size: int, weights: list[float] | None = None) -> WeightedSource:
    return WeightedSource(FakeSource(), FakeStore(size, weights))


def rows_of(mixed: MixedRows) -> list[int]:
    return [int(mixed[i].sequences[0].ids[0]) for i in range(len(mixed))]


def sizes_of(mixed: MixedRows) -> list[int]:
    return [len(part) for part in mixed.sources]


@settings(max_examples=50)
@given(size=st.integers(2, 400), share=st.integers(1, 399))
def test_holdout_and_remaining_rows_are_disjoint_and_complete(size, share):
    split = HoldoutSplit(size, min(share, size - 1))
    remaining, held_out = (part.rows(np.arange(len(part))) for part in (split, replace(split, is_held_out=True)))
    assert sorted([*remaining.tolist(), *held_out.tolist()]) == list(range(size))
    assert (np.diff(remaining) > 0).all() and (np.diff(held_out) > 0).all()


def test_holdout_is_spread_over_the_file_without_a_fixed_interval():
    held_out = HoldoutSplit(10_000, 100, is_held_out=True).rows(np.arange(100))
    assert [int(row) // 100 for row in held_out] == list(range(100))
    assert len(set((held_out % 100).tolist())) > 40


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), data=st.data())
def test_mixture_without_weights_has_every_row_once(sizes, data):
    mixed = mix_sources([[source(size)] for size in sizes], None)
    assert rows_of(mixed) == [i for size in sizes for i in range(size)]
    start = data.draw(st.integers(0, len(mixed)))
    stop = data.draw(st.integers(start, len(mixed)))
    assert mixed.lengths(start, stop).tolist() == [10 + row for row in rows_of(mixed)[start:stop]]


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4), data=st.data())
def test_mixture_has_the_requested_shares_and_every_row(sizes, data):
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    mixed = mix_sources([[source(size)] for size in sizes], weights)
    counts, rows, start = sizes_of(mixed), rows_of(mixed), 0
    for size, count, weight in zip(sizes, counts, weights, strict=True):
        assert count == pytest.approx(len(mixed) * weight / sum(weights), abs=len(sizes))
        repeats = np.bincount(rows[start : start + count], minlength=size)
        assert repeats.min() >= 1 and repeats.max() - repeats.min() <= 1
        start += count


def test_mixture_weight_is_divided_among_the_files_of_a_path():
    assert sizes_of(mix_sources([[source(10), source(20)], [source(10)]], [3.0, 1.0])) == [10, 20, 10]
    assert sizes_of(mix_sources([[source(10), source(20)], [source(10)]], [6.0, 1.0])) == [20, 40, 10]


@pytest.mark.parametrize(
    "weights, expected",
    [
        ([1.0, 2.0, 1.0], [0, 1, 1, 2]),
        ([0.5, 0.5], [0, 1]),
        ([0.5, 1.0], [0, 1, 1]),
        ([0.1, 0.1], [0, 1]),
        ([2.0, 2.0], [0, 0, 1, 1]),
    ],
)
def test_row_weights_repeat_rows_and_drop_none(weights, expected):
    mixed = mix_sources([[source(len(weights), weights)]], None)
    assert rows_of(mixed) == expected
    assert mixed.lengths(0, len(mixed)).tolist() == [10 + row for row in expected]


@settings(max_examples=25)
@given(st.lists(st.floats(0.05, 8), min_size=1, max_size=30))
def test_row_weights_of_any_size_are_met_within_one_repeat(weights):
    rows = rows_of(mix_sources([[source(len(weights), weights)]], None))
    repeats = np.bincount(rows, minlength=len(weights))
    assert repeats.min() >= 1 and repeats == pytest.approx(np.array(weights) / min(1.0, *weights), abs=1)


def test_mixture_weights_are_shares_of_the_epoch_with_row_weights_too():
    assert sizes_of(mix_sources([[source(10, [4.0] * 10)], [source(10)]], [1.0, 1.0])) == [10, 10]


@pytest.mark.parametrize("weights", [[1.0, 1e30], [1e-9, 1.0], [1e11]])
def test_mixture_weights_too_far_apart_are_refused(weights):
    with pytest.raises(UserError, match="the weights differ too much"):
        mix_sources([[source(len(weights), weights)]], None)


def test_mixture_fingerprint_depends_on_content_weights_and_holdout():
    plain = [source(10)]
    fingerprints = [
        mix_sources(entries, weights).fingerprint
        for entries, weights in (([plain], None), ([[source(11)]], None), ([plain, plain], [1.0, 2.0]))
    ]
    fingerprints += [MixedRows((part,)).fingerprint for part in source(10).hold_out(2)]
    assert len(set(fingerprints)) == 5
    assert mix_sources([[source(10)]], None).fingerprint == fingerprints[0]


def test_mixture_rows_are_named_by_file_and_line():
    remaining, _ = source(10).hold_out(1)
    mixed = mix_sources([[source(3)], [remaining]], None)
    assert mixed[2].name == "rows.jsonl:3"
    assert [mixed[3 + i].name for i in range(9)] == [f"rows.jsonl:{1 + row}" for row in rows_of(mixed)[3:]]


def test_row_weights_are_rounded_to_the_nearest_number_of_rows():
    assert sizes_of(mix_sources([[source(2, [1.0, 1.75])]], None)) == [3]


def test_mixture_fingerprint_depends_on_how_often_rows_are_repeated():
    entries = [[source(10)], [source(11)]]
    assert len({mix_sources(entries, weights).fingerprint for weights in (None, [1.0, 1.0], [1.0, 2.0])}) == 3


def test_mixture_fingerprint_depends_on_which_rows_are_left_out():
    parts = [replace(source(10), excluded=np.array(rows)) for rows in ([0, 1], [0, 2])]
    assert len({mix_sources([[part]], None).fingerprint for part in parts}) == 2


def test_weighted_sources_can_be_compared_and_hashed():
    first, second = source(3).upsampled(2), source(3).upsampled(2)
    assert first != second and first == first and len({first, second}) == 2
