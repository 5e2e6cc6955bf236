import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching.sampler import shuffled_index


@settings(max_examples=40)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_shuffled_index_is_a_permutation(size, seed, epoch):
    assert sorted(shuffled_index(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@settings(max_examples=40)
@given(size=st.integers(2, 3000), seed=st.integers(0, 2**31), data=st.data())
def test_shuffled_index_of_one_position_equals_that_of_all(size, seed, data):
    position = data.draw(st.integers(0, size - 1))
    assert shuffled_index(np.array([position]), size, seed, 0)[0] == shuffled_index(np.arange(size), size, seed, 0)[position]


def test_shuffled_index_differs_between_epochs_and_seeds():
    orders = {(seed, epoch): tuple(shuffled_index(np.arange(100), 100, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4


@pytest.mark.parametrize("size", [50, 64, pytest.param(1000, marks=pytest.mark.slow)])
def test_shuffled_index_gives_each_row_equal_chances(size):
    """Chi-square over 20 draws per row; a value 5 standard deviations above its mean means a skewed order."""
    draws = np.array([shuffled_index(np.array([0]), size, seed, 0)[0] for seed in range(20 * size)])
    observed = np.bincount(draws, minlength=size)
    chi_square = ((observed - 20) ** 2 / 20).sum()
    assert chi_square < (size - 1) + 5 * np.sqrt(2 * (size - 1))


def test_shuffled_index_of_hundred_million_rows_needs_no_table():
    rows = shuffled_index(np.arange(99_999_968, 100_000_000), 100_000_000, 7, 3)
    assert len(set(rows.tolist())) == 32 and rows.max() < 100_000_000
