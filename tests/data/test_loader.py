import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_fixtures import RandomRows, make_loader, names_of, unpacked

from data.background import Watch, prefetch
from data.batching.batch import IGNORE_INDEX, collate
from data.batching.loader import StepLoader
from data.batching.packing import UnpackedSequences
from data.batching.sampler import SORT_WINDOW_STEPS, LengthGroupedSampler
from data.types import EncodedRow, TokenSequence


def grouped_loader(rows: RandomRows, batch_size: int = 4, seed: int = 0) -> StepLoader:
    return StepLoader(
        UnpackedSequences(rows),
        LengthGroupedSampler(len(rows), batch_size, seed, rows.lengths),
        batch_size=batch_size,
        pad_id=0,
    )


@settings(max_examples=25)
@given(
    size=st.integers(1, 60), batch_size=st.integers(1, 8), accumulation_steps=st.integers(1, 4), epoch=st.integers(0, 3)
)
def test_epoch_has_every_row_once_including_the_short_last_step(size, batch_size, accumulation_steps, epoch):
    loader = make_loader(unpacked(size), batch_size, accumulation_steps)
    steps = names_of(loader.iter_epoch(epoch))
    assert len(steps) == loader.steps_per_epoch
    assert sorted(name for step in steps for name in step) == sorted(f"row:{i}" for i in range(size))


@settings(max_examples=25)
@given(size=st.integers(1, 60), skip=st.integers(0, 20), epoch=st.integers(0, 3))
def test_epoch_with_skipped_steps_equals_the_end_of_the_epoch(size, skip, epoch):
    loader = make_loader(unpacked(size))
    assert names_of(loader.iter_epoch(epoch, skip)) == names_of(loader.iter_epoch(epoch))[skip:]


def test_step_has_the_same_rows_for_any_number_of_micro_batches():
    one, two, four = (
        names_of(make_loader(unpacked(37), size, steps).iter_epoch(1)) for size, steps in ((8, 1), (4, 2), (2, 4))
    )
    assert one == two == four


@settings(max_examples=15)
@given(size=st.integers(1, 60), world_size=st.integers(1, 5), batch_size=st.integers(1, 4), epoch=st.integers(0, 2))
def test_ranks_divide_each_step_without_overlap_or_loss(size, world_size, batch_size, epoch):
    alone = names_of(make_loader(unpacked(size), batch_size * world_size).iter_epoch(epoch))
    loaders = [
        make_loader(unpacked(size), batch_size, world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    by_rank = [names_of(loader.iter_epoch(epoch)) for loader in loaders]
    for step, rows in enumerate(alone):
        shares = [steps[step] for steps in by_rank]
        assert sorted(name for share in shares for name in share) == sorted(rows)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_get_equally_many_batches_and_dummies_have_no_tokens(world_size):
    ranks = [
        list(make_loader(unpacked(13), 2, 3, rank=rank, world_size=world_size).iter_epoch(0))
        for rank in range(world_size)
    ]
    assert len({tuple(map(len, steps)) for steps in ranks}) == 1
    batches = [batch for steps in ranks for step in steps for batch in step]
    assert sorted(name for batch in batches for name in batch.names) == sorted(f"row:{i}" for i in range(13))
    assert all(batch.num_supervised_tokens == batch.num_tokens == 0 for batch in batches if not batch.names)


@pytest.mark.slow
@settings(max_examples=15)
@given(size=st.integers(1, 300), batch_size=st.integers(1, 8), skip=st.integers(0, 90), epoch=st.integers(0, 2))
def test_grouping_by_length_has_every_row_once_and_can_start_anywhere(size, batch_size, skip, epoch):
    rows = RandomRows([1 + (7 * i) % 61 for i in range(size)])
    steps = names_of(grouped_loader(rows, batch_size).iter_epoch(epoch))
    assert sorted(name for step in steps for name in step) == sorted(f"row:{i}" for i in range(size))
    assert names_of(grouped_loader(rows, batch_size).iter_epoch(epoch, skip)) == steps[skip:]


def test_grouping_by_length_pads_little_and_keeps_steps_shuffled():
    rows = RandomRows([1 + (7 * i) % 61 for i in range(4 * SORT_WINDOW_STEPS)])

    def fill_ratio(loader: StepLoader) -> float:
        batches = [batch for step in loader.iter_epoch(0) for batch in step]
        return sum(batch.num_tokens for batch in batches) / sum(batch.input_ids.numel() for batch in batches)

    assert fill_ratio(grouped_loader(rows)) > 0.85 > 0.7 > fill_ratio(make_loader(UnpackedSequences(rows)))
    longest = [int(step[0].lengths.max()) for step in grouped_loader(rows).iter_epoch(0)]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.3


def test_workers_change_no_batch():
    alone, helped = (
        list(make_loader(unpacked(30), num_workers=num_workers).iter_steps(2, 20)) for num_workers in (0, 2)
    )
    for step, other in zip(alone, helped, strict=True):
        assert all(
            torch.equal(a.input_ids, b.input_ids) and a.names == b.names for a, b in zip(step, other, strict=True)
        )


@pytest.mark.parametrize(("start", "end"), [(0, 12), (3, 9), (5, 5)])
def test_iter_steps_across_epochs_equals_the_epochs_in_turn(start, end):
    loader = make_loader(unpacked(13))
    assert loader.steps_per_epoch == 4
    assert (
        names_of(loader.iter_steps(start, end))
        == [step for epoch in range(3) for step in names_of(loader.iter_epoch(epoch))][start:end]
    )


class NamedByProcess(UnpackedSequences):
    """Rows named after the process and the thread that read them."""

    def __init__(self, size: int) -> None:
        super().__init__(RandomRows([1] * size))

    def __getitem__(self, index: int) -> list[EncodedRow]:
        return [
            row._replace(name=f"{os.getpid()} {threading.current_thread().name}") for row in super().__getitem__(index)
        ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_same_worker_or_thread_continues_in_the_next_epoch(num_workers):
    steps = names_of(make_loader(NamedByProcess(3), num_workers=num_workers).iter_steps(0, 5))
    assert len(steps) == 5 and len({name for step in steps for name in step}) == 1


def test_loader_does_not_change_the_global_random_state():
    before = torch.get_rng_state()
    next(make_loader(unpacked(10)).iter_epoch(0))
    assert torch.equal(before, torch.get_rng_state())


def test_labels_are_the_next_tokens_where_the_loss_mask_is_set():
    row = EncodedRow(
        (TokenSequence(np.array([1, 5, 6, 7, 2], dtype=np.int32), np.array([False, False, True, True, False])),), "row"
    )
    batch = collate([[row]], pad_id=0, packed=False)
    assert batch.input_ids[0, :4].tolist() == [1, 5, 6, 7]
    assert batch.labels[0, :4].tolist() == [IGNORE_INDEX, 6, 7, IGNORE_INDEX]
    assert batch.lengths.tolist() == [4] and batch.num_supervised_tokens == 2
    assert (batch.labels[0, 4:] == IGNORE_INDEX).all() and (batch.input_ids[0, 4:] == 0).all()


def test_preference_batch_has_all_chosen_before_all_rejected():
    def pair(first: int) -> EncodedRow:
        sequences = (
            TokenSequence(np.array([n, n + 1, n + 2], dtype=np.int32), np.array([False, True, True]))
            for n in (first, first + 50)
        )
        return EncodedRow(tuple(sequences), f"row:{first}")

    batch = collate([[pair(10)], [pair(20)]], pad_id=0, packed=False)
    assert batch.input_ids[:, 0].tolist() == [10, 20, 60, 70]


def test_prefetch_raises_an_error_when_the_item_is_requested():
    def items():
        yield 1
        raise ZeroDivisionError

    steps = prefetch(items(), Watch(), str)
    assert next(steps) == 1
    with pytest.raises(ZeroDivisionError):
        next(steps)


def test_prefetch_closes_its_source_and_ends_its_thread():
    closed = []

    def items():
        try:
            yield from range(1, 100)
        finally:
            closed.append(threading.current_thread().name)

    before = threading.active_count()
    steps = prefetch(items(), Watch(), str)
    assert next(steps) == 1
    steps.close()
    assert closed and threading.active_count() == before


def test_grouping_by_length_has_another_order_of_steps_in_each_epoch():
    # sorted by length, the steps of every epoch have the same rows
    rows = RandomRows([1 + i // 4 for i in range(4 * SORT_WINDOW_STEPS)])
    epochs = [[step[0].lengths.tolist() for step in grouped_loader(rows).iter_epoch(epoch)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and all(
        sorted(epoch) == sorted(epochs[0]) for epoch in epochs
    )
