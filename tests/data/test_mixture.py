from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batching.mixture import HoldoutSplit, MixedRows, WeightedSource, mix_sources


class MadeStore:
    """Row i feeds 10 + i positions; its weight is what is given."""

    def __init__(self, size: int, weights: list[float] | None = None) -> None:
        self.size, self._weights, self.has_weights, self.digest = size, weights, weights is not None, f"store of {size}"

    def __len__(self) -> int:
        return self.size

    def read(self, i: int):
        return [(np.full(11 + i, i, np.int32), np.ones(11 + i, bool))], i + 1

    def lengths(self, start: int, stop: int) -> np.ndarray:
        return np.arange(10 + start, 10 + stop)

    def weights(self, start: int, stop: int) -> np.ndarray:
        return np.array(self._weights[start:stop], np.float32)


class MadeSource:
    path = Path("rows.jsonl")

    def where(self, place: int) -> str:
        return f"{self.path}:{place}"


def part(size: int, weights: list[float] | None = None) -> WeightedSource:
    return WeightedSource(MadeSource(), MadeStore(size, weights))


def shown(rows: MixedRows) -> list[int]:
    return [int(rows[i].sequences[0].ids[0]) for i in range(len(rows))]


@given(size=st.integers(2, 400), share=st.integers(1, 399))
def test_what_is_held_out_and_what_is_kept_make_up_the_file(size, share):
    split = HoldoutSplit(size, min(share, size - 1))
    kept, held = split.kept(np.arange(size - split.held_out)), split.held(np.arange(split.held_out))
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(size))
    assert (np.diff(kept) > 0).all() and (np.diff(held) > 0).all()


def test_held_out_rows_are_spread_over_a_sorted_file_and_follow_no_rhythm():
    held = HoldoutSplit(10_000, 100).held(np.arange(100))
    assert [int(row) // 100 for row in held] == list(range(100))
    assert len(set((held % 100).tolist())) > 40


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=4), data=st.data())
def test_without_weights_every_row_is_shown_once(sizes, data):
    rows = mix_sources([[part(size)] for size in sizes], None)
    assert shown(rows) == [i for size in sizes for i in range(size)]
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert rows.lengths(start, stop).tolist() == [10 + row for row in shown(rows)[start:stop]]


@given(sizes=st.lists(st.integers(1, 60), min_size=2, max_size=4), data=st.data())
def test_a_mixture_has_the_shares_asked_for_and_misses_no_row(sizes, data):
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
    rows = mix_sources([[part(size)] for size in sizes], weights)
    counts = [len(piece) for piece in rows.parts]
    for count, weight in zip(counts, weights, strict=True):
        assert count == pytest.approx(len(rows) * weight / sum(weights), abs=len(sizes))
    begin = 0
    for size, count in zip(sizes, counts, strict=True):
        times = np.bincount(shown(rows)[begin : begin + count], minlength=size)
        assert times.min() >= 1 and times.max() - times.min() <= 1
        begin += count


def test_one_word_may_name_several_files_that_share_its_weight():
    rows = mix_sources([[part(10), part(20)], [part(10)]], [3.0, 1.0])
    assert [len(piece) for piece in rows.parts] == [10, 20, 10]
    rows = mix_sources([[part(10), part(20)], [part(10)]], [6.0, 1.0])
    assert [len(piece) for piece in rows.parts] == [20, 40, 10]


@pytest.mark.parametrize(
    "weights, expected",
    [([1.0, 2.0, 1.0], [0, 1, 1, 2]), ([0.5, 0.5], [0, 1]), ([0.5, 1.0], [0, 1, 1]), ([0.1, 0.1], [0, 1]), ([2.0, 2.0], [0, 0, 1, 1])],
)
def test_a_row_is_shown_as_often_as_its_weight_says_and_none_is_missing(weights, expected):
    rows = mix_sources([[part(len(weights), weights)]], None)
    assert shown(rows) == expected
    assert rows.lengths(0, len(rows)).tolist() == [10 + row for row in expected]


@given(st.lists(st.floats(0.01, 8), min_size=1, max_size=40))
def test_whatever_the_weights_of_rows_none_is_missing(weights):
    rows = shown(mix_sources([[part(len(weights), weights)]], None))
    times = np.bincount(rows, minlength=len(weights))
    assert times.min() >= 1 and times == pytest.approx(np.array(weights) / min(1.0, *weights), abs=1)


def test_shares_are_those_of_what_is_shown_whatever_rows_weigh():
    rows = mix_sources([[part(10, [4.0] * 10)], [part(10)]], [1.0, 1.0])
    assert [len(piece) for piece in rows.parts] == [10, 10]


@pytest.mark.parametrize("weights", [[1.0, 1e30], [1e-9, 1.0], [1e11]])
def test_weights_too_far_apart_are_refused(weights):
    with pytest.raises(ValueError, match="an epoch without a missing row"):
        mix_sources([[part(len(weights), weights)]], None)


def test_the_fingerprint_knows_content_weights_and_what_is_held_out():
    plain = [part(10)]
    prints = {mix_sources([plain], None).fingerprint, mix_sources([[part(11)]], None).fingerprint, mix_sources([plain, plain], [1.0, 2.0]).fingerprint}
    kept, held = part(10).held_out(2)
    assert len(prints | {MixedRows((kept,)).fingerprint, MixedRows((held,)).fingerprint}) == 5
    assert mix_sources([[part(10)]], None).fingerprint == mix_sources([plain], None).fingerprint


def test_a_row_says_where_it_stands():
    kept, _ = part(10).held_out(1)
    rows = mix_sources([[part(3)], [kept]], None)
    assert rows[2].name == "rows.jsonl:3"
    assert [rows[3 + i].name for i in range(9)] == [f"rows.jsonl:{1 + row}" for row in shown(rows)[3:]]
