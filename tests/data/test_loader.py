import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from row_fixtures import MadeRows, loader, names, singles

from data.batching.batch import IGNORE_INDEX, UnpackedWindows, collate
from data.batching.loader import StepLoader, prefetch
from data.batching.sampler import SORT_WINDOW_STEPS, LengthGroupedSampler
from data.types import EncodedRow, TokenSequence


def grouped(rows: MadeRows, batch_size: int = 4, seed: int = 0, **more: int) -> StepLoader:
    return StepLoader(UnpackedWindows(rows), LengthGroupedSampler(rows, batch_size, seed), batch_size=batch_size, pad_id=0, packed=False, **more)


@given(size=st.integers(1, 60), batch_size=st.integers(1, 8), accumulation_steps=st.integers(1, 4), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_row_once_the_short_last_step_included(size, batch_size, accumulation_steps, epoch):
    it = loader(singles(size), batch_size, accumulation_steps)
    steps = names(it.steps(epoch))
    assert len(steps) == it.steps_per_epoch
    assert sorted(name for step in steps for name in step) == sorted(f"row:{i}" for i in range(size))


@given(size=st.integers(1, 60), skip=st.integers(0, 20), epoch=st.integers(0, 3))
def test_skipping_equals_the_tail_of_the_whole_epoch(size, skip, epoch):
    it = loader(singles(size))
    assert names(it.steps(epoch, skip)) == names(it.steps(epoch))[skip:]


def test_a_step_holds_the_same_rows_however_it_is_cut():
    whole, halves, quarters = (names(loader(singles(37), b, a).steps(1)) for b, a in ((8, 1), (4, 2), (2, 4)))
    assert whole == halves == quarters


@given(size=st.integers(1, 60), world=st.integers(1, 5), batch_size=st.integers(1, 4), epoch=st.integers(0, 2))
def test_ranks_share_each_step_without_overlap_and_leave_nothing_out(size, world, batch_size, epoch):
    alone = names(loader(singles(size), batch_size * world).steps(epoch))
    dealt = [names(loader(singles(size), batch_size, world, rank=rank, world=world).steps(epoch)) for rank in range(world)]
    for step, rows in enumerate(alone):
        parts = [mine[step] for mine in dealt]
        assert sorted(name for part in parts for name in part) == sorted(rows)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(size=st.integers(1, 300), batch_size=st.integers(1, 8), skip=st.integers(0, 90), epoch=st.integers(0, 2))
def test_grouping_by_length_loses_no_row_and_may_be_entered_anywhere(size, batch_size, skip, epoch):
    rows = MadeRows([1 + (7 * i) % 61 for i in range(size)])
    steps = names(grouped(rows, batch_size).steps(epoch))
    assert sorted(name for step in steps for name in step) == sorted(f"row:{i}" for i in range(size))
    assert names(grouped(rows, batch_size).steps(epoch, skip)) == steps[skip:]


def test_grouping_by_length_pads_little_and_keeps_steps_of_all_lengths_mixed():
    rows = MadeRows([1 + (7 * i) % 61 for i in range(4 * SORT_WINDOW_STEPS)])

    def fill(it: StepLoader) -> float:
        batches = [batch for step in it.steps(0) for batch in step]
        return sum(int(batch.lengths.sum()) for batch in batches) / sum(batch.input_ids.numel() for batch in batches)

    assert fill(grouped(rows)) > 0.85 > 0.7 > fill(loader(UnpackedWindows(rows)))
    longest = [int(step[0].lengths.max()) for step in grouped(rows).steps(0)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


class NamedByTheirMaker(UnpackedWindows):
    """Rows whose name is that of the process and the thread they were made in."""

    def __init__(self, size: int) -> None:
        super().__init__(MadeRows([1] * size))

    def __getitem__(self, index: int) -> list[EncodedRow]:
        return [row._replace(name=f"{os.getpid()} {threading.current_thread().name}") for row in super().__getitem__(index)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers):
    alone, helped = list(loader(singles(30)).steps(0)), list(loader(singles(30), num_workers=num_workers).steps(0))
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a.input_ids, b.input_ids) and a.names == b.names for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("start", "end"), [(0, 12), (3, 9), (5, 5)])
def test_going_on_over_the_ends_of_epochs_is_one_epoch_after_the_other(start, end, num_workers):
    rows = loader(singles(13), num_workers=num_workers)
    assert rows.steps_per_epoch == 4
    assert names(rows.onward(start, end)) == [step for epoch in range(3) for step in names(rows.steps(epoch))][start:end]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_where_an_epoch_ends_nobody_is_replaced(num_workers):
    makers = names(loader(NamedByTheirMaker(3), num_workers=num_workers).onward(0, 5))
    assert len(makers) == 5 and len({name for step in makers for name in step}) == 1


def test_opening_a_loader_draws_nothing_from_the_random_state():
    before = torch.get_rng_state()
    next(loader(singles(10)).steps(0))
    assert torch.equal(before, torch.get_rng_state())


def test_labels_are_the_next_tokens_where_they_are_learned():
    row = EncodedRow((TokenSequence(np.array([1, 5, 6, 7, 2], dtype=np.int32), np.array([False, False, True, True, False])),), "row")
    batch = collate([[row]], pad_id=0, packed=False)
    assert batch.input_ids[0, :4].tolist() == [1, 5, 6, 7]
    assert batch.labels[0, :4].tolist() == [IGNORE_INDEX, 6, 7, IGNORE_INDEX]
    assert batch.lengths.tolist() == [4] and batch.supervised == 2
    assert (batch.labels[0, 4:] == IGNORE_INDEX).all() and (batch.input_ids[0, 4:] == 0).all()


def test_preference_pairs_lie_all_chosen_then_all_rejected():
    def pair(n: int) -> EncodedRow:
        sides = tuple(TokenSequence(np.array([n, n + 1, n + 2], dtype=np.int32), np.array([False, True, True])) for n in (n, n + 50))
        return EncodedRow(sides, f"row:{n}")

    batch = collate([[pair(10)], [pair(20)]], pad_id=0, packed=False)
    assert batch.input_ids[:, 0].tolist() == [10, 20, 60, 70]


def test_a_step_that_is_made_ahead_breaks_where_it_is_used():
    def made():
        yield 1
        raise ZeroDivisionError

    steps = prefetch(made())
    assert next(steps) == 1
    with pytest.raises(ZeroDivisionError):
        next(steps)


def test_what_is_left_early_is_closed_and_its_thread_ends():
    closed = []

    def made():
        try:
            yield from range(1, 100)
        finally:
            closed.append(threading.current_thread().name)

    before = threading.active_count()
    steps = prefetch(made())
    assert next(steps) == 1
    steps.close()
    assert closed and threading.active_count() == before


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_make_equally_many_batches_and_every_row_once(world):
    ranks = [list(loader(singles(13), 2, 3, rank=rank, world=world).steps(0)) for rank in range(world)]
    assert len({tuple(map(len, steps)) for steps in ranks}) == 1
    names = [name for steps in ranks for batches in steps for batch in batches for name in batch.names]
    assert len(names) == len(set(names)) == 13
    idle = [batch for steps in ranks for batches in steps for batch in batches if not batch.names]
    assert all(batch.supervised == batch.positions == 0 for batch in idle)
