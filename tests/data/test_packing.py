import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import MadeRows, loader, names

from data.loader import IGNORE, collate
from data.packing import Packed, best_fit

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


@given(lengths=LENGTHS)
def test_no_row_is_lost_and_no_window_is_overfull(lengths):
    windows = best_fit(np.array(lengths), 64)
    assert sorted(i for window in windows for i in window) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in window) for window in windows) <= 64


@given(lengths=LENGTHS)
def test_there_are_at_most_eleven_ninths_of_the_fewest_windows(lengths):
    fewest = -(-sum(lengths) // 64)
    assert len(best_fit(np.array(lengths), 64)) <= max(11 / 9 * max(fewest, sum(length > 32 for length in lengths)) + 6 / 9, 1)


def test_a_row_that_fits_no_window_is_an_error():
    with pytest.raises(ValueError, match="65 positions"):
        best_fit(np.array([3, 65]), 64)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, sides=st.sampled_from([1, 2]))
def test_packed_batches_hold_the_same_tokens_and_teach_the_same_ones(tmp_path_factory, lengths, sides):
    rows = MadeRows([max(length, sides) for length in lengths], sides)
    packed = Packed(rows, 64, tmp_path_factory.mktemp("cache"))
    lessons = {True: [], False: []}
    for is_packed, windows in ((True, [packed[w] for w in range(len(packed))]), (False, [[rows[i]] for i in range(len(rows))])):
        batch = collate(windows, pad_id=0, packed=is_packed)
        ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
        lessons[is_packed] = sorted(zip(ids[labels != IGNORE].tolist(), labels[labels != IGNORE].tolist(), strict=True))
        assert sorted(batch.lengths.tolist()) == sorted(len(sequence.ids) - 1 for i in range(len(rows)) for sequence in rows[i].sequences)
        assert batch.supervised == sum(int(sequence.learn[1:].sum()) for i in range(len(rows)) for sequence in rows[i].sequences)
        assert sorted(batch.names) == sorted(f"row:{i}" for i in range(len(rows)))
    assert lessons[True] == lessons[False]


def test_positions_begin_anew_with_each_sequence_and_padding_belongs_to_none():
    rows = MadeRows([3, 2, 4])
    batch = collate([[rows[0], rows[1]], [rows[2]]], pad_id=9, packed=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.sequences.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, 2, -1, -1, -1, -1]]
    assert (batch.input_ids[batch.sequences == -1] == 9).all() and (batch.labels[batch.sequences == -1] == IGNORE).all()


def test_packed_pairs_are_numbered_all_chosen_then_all_rejected():
    rows = MadeRows([4, 6], sides=2)
    batch = collate([[rows[0], rows[1]]], pad_id=0, packed=True)
    assert batch.sequences[0, :10].tolist() == [0, 0, 2, 2, 1, 1, 1, 3, 3, 3]
    assert batch.lengths.tolist() == [2, 3, 2, 3]


def test_a_plan_is_the_same_again_and_is_read_from_the_disk(tmp_path, monkeypatch):
    rows = MadeRows(list(range(1, 60)))
    first = Packed(rows, 64, tmp_path)
    monkeypatch.setattr("data.packing._groups", None)  # a second plan would have to call it
    again = Packed(rows, 64, tmp_path)
    assert [[row.name for row in again[w]] for w in range(len(again))] == [[row.name for row in first[w]] for w in range(len(first))]
    assert again.fingerprint == first.fingerprint and again.fill == first.fill == sum(range(1, 60)) / (len(first) * 64)


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-8], lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], lambda raw: b""], ids=["cut", "flipped", "emptied"]
)
def test_a_torn_plan_is_made_again(tmp_path, spoil):
    rows = MadeRows(list(range(1, 60)))
    path = Packed(rows, 64, tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    assert len(Packed(rows, 64, tmp_path)) and path.read_bytes() == whole
    assert os.listdir(tmp_path) == [path.name]


def test_a_plan_reaches_a_worker(tmp_path):
    packed = Packed(MadeRows(list(range(1, 60))), 64, tmp_path)
    assert [row.name for row in pickle.loads(pickle.dumps(packed))[3]] == [row.name for row in packed[3]]


def test_rows_of_a_sorted_file_meet_in_windows(tmp_path):
    """20,000 rows in slices of 1,024: a window must not hold neighbours only."""
    packed = Packed(MadeRows([10] * 20_000), 40, tmp_path)
    spread = [max(numbers) - min(numbers) for numbers in ([int(row.name[4:]) for row in packed[w]] for w in range(0, len(packed), 50))]
    assert np.median(spread) > 5_000


def test_an_epoch_of_windows_holds_every_row_once(tmp_path):
    packed = Packed(MadeRows([1 + i % 37 for i in range(300)]), 64, tmp_path)
    assert sorted(name for step in names(loader(packed, packed=True).steps(0)) for name in step) == sorted(f"row:{i}" for i in range(300))
