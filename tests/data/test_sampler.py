import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import sampler
from data.batching.sampler import shuffled_index


@settings(max_examples=40)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 100))
def test_shuffled_index_is_a_permutation(size, seed, epoch):
    assert sorted(shuffled_index(np.arange(size), size, seed, epoch).tolist()) == list(range(size))


@settings(max_examples=40)
@given(size=st.integers(2, 3000), seed=st.integers(0, 2**31), data=st.data())
def test_shuffled_index_of_one_position_equals_that_of_all(size, seed, data):
    position = data.draw(st.integers(0, size - 1))
    assert (
        shuffled_index(np.array([position]), size, seed, 0)[0]
        == shuffled_index(np.arange(size), size, seed, 0)[position]
    )


@pytest.mark.parametrize("small_size", [sampler.SMALL_SIZE, 0], ids=["small", "large"])
def test_shuffled_index_differs_between_epochs_and_seeds(small_size, monkeypatch):
    monkeypatch.setattr(sampler, "SMALL_SIZE", small_size)
    orders = {
        (seed, epoch): tuple(shuffled_index(np.arange(100), 100, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4


def chi_square(observed: dict, outcomes: list) -> float:
    """Return the statistic of `observed` counts of equally likely outcomes, in standard deviations above its mean."""
    expected = sum(observed.values()) / len(outcomes)
    statistic = sum((observed.get(outcome, 0) - expected) ** 2 / expected for outcome in outcomes)
    return (statistic - (len(outcomes) - 1)) / np.sqrt(2 * (len(outcomes) - 1))


@pytest.mark.parametrize("vary", ["seed", "epoch"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_shuffle_of_a_few_items_gives_every_permutation_equal_chances(size, vary):
    permutations = list(itertools.permutations(range(size)))
    draws = [
        shuffled_index(np.arange(size), size, *((i, 0) if vary == "seed" else (0, i)))
        for i in range(40 * len(permutations))
    ]
    assert chi_square(Counter(map(tuple, np.array(draws).tolist())), permutations) < 4


@pytest.mark.parametrize("size", range(6, 11))
def test_shuffle_of_up_to_ten_items_gives_all_pairs_equal_chances(size):
    draws = np.array([shuffled_index(np.arange(size), size, seed, 0) for seed in range(3000)])
    pairs = list(itertools.permutations(range(size), 2))
    for a, b in ((0, 1), (0, size - 1), (size // 2, 1)):
        assert chi_square(Counter(map(tuple, draws[:, [a, b]].tolist())), pairs) < 4
    odd = [sum(draw[i] > draw[j] for i in range(size) for j in range(i + 1, size)) % 2 for draw in draws]
    # a Feistel network of a power of four has even permutations only
    assert abs(np.mean(odd) - 0.5) < 4 * 0.5 / np.sqrt(len(draws))


@pytest.mark.parametrize("size", [50, 64, pytest.param(1000, marks=pytest.mark.slow)])
def test_shuffled_index_gives_each_row_equal_chances(size):
    draws = [int(shuffled_index(np.array([0]), size, seed, 0)[0]) for seed in range(20 * size)]
    assert chi_square(Counter(draws), list(range(size))) < 5


def test_large_shuffle_is_a_permutation_without_a_table(monkeypatch):
    monkeypatch.setattr(sampler, "SMALL_SIZE", 0)
    for size in (1, 2, 37, 1000, 5000):
        order = shuffled_index(np.arange(size), size, 3, 1)
        assert (
            sorted(order.tolist()) == list(range(size))
            and shuffled_index(np.array([size - 1]), size, 3, 1)[0] == order[-1]
        )


def test_shuffled_index_of_hundred_million_rows_needs_no_table():
    rows = shuffled_index(np.arange(99_999_968, 100_000_000), 100_000_000, 7, 3)
    assert len(set(rows.tolist())) == 32 and rows.max() < 100_000_000
