import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.loader import IGNORE, StepLoader, collate
from data.rows import Row, Sequence


class Numbered:
    """Ragged rows whose tokens tell which row they are of."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Row:
        ids = np.full(2 + index % 5, 10 + index, dtype=np.int32)
        return Row((Sequence(ids, np.arange(len(ids)) > 0),), name=f"row:{index}")


def loader(size: int, batch_size: int = 4, accumulation_steps: int = 1, seed: int = 0, num_workers: int = 0) -> StepLoader:
    return StepLoader(Numbered(size), batch_size=batch_size, accumulation_steps=accumulation_steps, seed=seed, pad_id=0, num_workers=num_workers)


def names(steps) -> list[list[str]]:
    return [[name for batch in batches for name in batch.names] for batches in steps]


@given(size=st.integers(1, 60), batch_size=st.integers(1, 8), accumulation_steps=st.integers(1, 4), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_row_once_the_short_last_step_included(size, batch_size, accumulation_steps, epoch):
    it = loader(size, batch_size, accumulation_steps)
    steps = names(it.steps(epoch))
    assert len(steps) == it.steps_per_epoch
    assert sorted(name for step in steps for name in step) == sorted(f"row:{i}" for i in range(size))


@given(size=st.integers(1, 60), skip=st.integers(0, 20), epoch=st.integers(0, 3))
def test_skipping_equals_the_tail_of_the_whole_epoch(size, skip, epoch):
    it = loader(size)
    assert names(it.steps(epoch, skip)) == names(it.steps(epoch))[skip:]


def test_a_step_holds_the_same_rows_however_it_is_cut():
    whole, halves, quarters = (names(loader(37, b, a).steps(1)) for b, a in ((8, 1), (4, 2), (2, 4)))
    assert whole == halves == quarters


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers):
    alone, helped = list(loader(30).steps(0)), list(loader(30, num_workers=num_workers).steps(0))
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a.input_ids, b.input_ids) and a.names == b.names for a, b in zip(mine, theirs, strict=True))


def test_opening_a_loader_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    next(loader(10).steps(0))
    assert torch.equal(before, torch.get_rng_state())


def test_labels_are_the_next_tokens_where_they_are_learned():
    row = Row((Sequence(np.array([1, 5, 6, 7, 2], dtype=np.int32), np.array([False, False, True, True, False])),), "row")
    batch = collate([row], pad_id=0)
    assert batch.input_ids[0, :4].tolist() == [1, 5, 6, 7]
    assert batch.labels[0, :4].tolist() == [IGNORE, 6, 7, IGNORE]
    assert batch.lengths.tolist() == [4] and batch.supervised == 2
    assert (batch.labels[0, 4:] == IGNORE).all() and (batch.input_ids[0, 4:] == 0).all()


def test_preference_pairs_lie_all_chosen_then_all_rejected():
    def pair(n: int) -> Row:
        sides = tuple(Sequence(np.array([n, n + 1, n + 2], dtype=np.int32), np.array([False, True, True])) for n in (n, n + 50))
        return Row(sides, f"row:{n}")

    batch = collate([pair(10), pair(20)], pad_id=0)
    assert batch.input_ids[:, 0].tolist() == [10, 20, 60, 70]
