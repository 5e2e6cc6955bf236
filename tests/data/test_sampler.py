import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batching.sampler import shuffled_index


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_every_row_stands_at_exactly_one_position(size, seed, epoch):
    assert sorted(shuffled_index(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@given(size=st.integers(2, 3000), seed=st.integers(0, 2**31), data=st.data())
def test_a_position_looked_up_alone_holds_the_same_row(size, seed, data):
    position = data.draw(st.integers(0, size - 1))
    assert shuffled_index(np.array([position]), size, seed, 0)[0] == shuffled_index(np.arange(size), size, seed, 0)[position]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {(seed, epoch): tuple(shuffled_index(np.arange(100), 100, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4


@pytest.mark.parametrize("size", [50, 64, 1000])
def test_each_row_is_about_equally_likely_at_the_first_position(size):
    """Chi-square over 200 draws a row: 5 standard deviations above its mean would be a skewed order."""
    draws = np.array([shuffled_index(np.array([0]), size, seed, 0)[0] for seed in range(20 * size)])
    observed = np.bincount(draws, minlength=size)
    chi_square = ((observed - 20) ** 2 / 20).sum()
    assert chi_square < (size - 1) + 5 * np.sqrt(2 * (size - 1))


def test_a_position_among_a_hundred_million_rows_needs_no_memory_for_them():
    rows = shuffled_index(np.arange(99_999_968, 100_000_000), 100_000_000, 7, 3)
    assert len(set(rows.tolist())) == 32 and rows.max() < 100_000_000
