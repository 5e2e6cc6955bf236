import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from row_fixtures import MadeRows, loader, names

from data.batching.batch import IGNORE_INDEX, collate
from data.batching.packing import PackedWindows, best_fit_plan

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


@given(lengths=LENGTHS)
def test_no_row_is_lost_and_no_window_is_overfull(lengths):
    windows = best_fit_plan(np.array(lengths), 64)
    assert sorted(i for window in windows for i in window) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in window) for window in windows) <= 64


@given(lengths=LENGTHS)
def test_there_are_at_most_eleven_ninths_of_the_fewest_windows(lengths):
    fewest = -(-sum(lengths) // 64)
    assert len(best_fit_plan(np.array(lengths), 64)) <= max(11 / 9 * max(fewest, sum(length > 32 for length in lengths)) + 6 / 9, 1)


def test_a_row_that_fits_no_window_is_an_error():
    with pytest.raises(ValueError, match="65 positions"):
        best_fit_plan(np.array([3, 65]), 64)


@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, sides=st.sampled_from([1, 2]))
def test_packed_batches_hold_the_same_tokens_and_teach_the_same_ones(tmp_path_factory, lengths, sides):
    rows = MadeRows([max(length, sides) for length in lengths], sides)
    packed = PackedWindows(rows, 64, tmp_path_factory.mktemp("cache"))
    lessons = {True: [], False: []}
    for is_packed, windows in ((True, [packed[w] for w in range(len(packed))]), (False, [[rows[i]] for i in range(len(rows))])):
        batch = collate(windows, pad_id=0, packed=is_packed)
        ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
        lessons[is_packed] = sorted(zip(ids[labels != IGNORE_INDEX].tolist(), labels[labels != IGNORE_INDEX].tolist(), strict=True))
        assert sorted(batch.lengths.tolist()) == sorted(len(sequence.ids) - 1 for i in range(len(rows)) for sequence in rows[i].sequences)
        assert batch.supervised == sum(int(sequence.learn[1:].sum()) for i in range(len(rows)) for sequence in rows[i].sequences)
        assert sorted(batch.names) == sorted(f"row:{i}" for i in range(len(rows)))
    assert lessons[True] == lessons[False]


def test_positions_begin_anew_with_each_sequence_and_padding_belongs_to_none():
    rows = MadeRows([3, 2, 4])
    batch = collate([[rows[0], rows[1]], [rows[2]]], pad_id=9, packed=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.sequences.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, 2, -1, -1, -1, -1]]
    assert (batch.input_ids[batch.sequences == -1] == 9).all() and (batch.labels[batch.sequences == -1] == IGNORE_INDEX).all()


def test_packed_pairs_are_numbered_all_chosen_then_all_rejected():
    rows = MadeRows([4, 6], sides=2)
    batch = collate([[rows[0], rows[1]]], pad_id=0, packed=True)
    assert batch.sequences[0, :10].tolist() == [0, 0, 2, 2, 1, 1, 1, 3, 3, 3]
    assert batch.lengths.tolist() == [2, 3, 2, 3]


def test_a_plan_is_the_same_again_and_is_read_from_the_disk(tmp_path, monkeypatch):
    rows = MadeRows(list(range(1, 60)))
    first = PackedWindows(rows, 64, tmp_path)
    monkeypatch.setattr("data.packing._groups", None)  # a second plan would have to call it
    again = PackedWindows(rows, 64, tmp_path)
    assert [[row.name for row in again[w]] for w in range(len(again))] == [[row.name for row in first[w]] for w in range(len(first))]
    assert again.fingerprint == first.fingerprint and again.fill == first.fill == sum(range(1, 60)) / (len(first) * 64)


@pytest.mark.parametrize(
    "spoil", [lambda raw: raw[:-8], lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], lambda raw: b""], ids=["cut", "flipped", "emptied"]
)
def test_a_torn_plan_is_made_again(tmp_path, spoil):
    rows = MadeRows(list(range(1, 60)))
    path = PackedWindows(rows, 64, tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    assert len(PackedWindows(rows, 64, tmp_path)) and path.read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, f"{path.name}.lock"])


def test_a_plan_that_is_refused_is_closed(tmp_path):
    rows = MadeRows(list(range(1, 60)))
    path = PackedWindows(rows, 64, tmp_path).path
    for _ in range(3):
        before = len(os.listdir("/proc/self/fd"))
        path.write_bytes(path.read_bytes()[:-8])
        PackedWindows(rows, 64, tmp_path)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_explained_and_leaves_no_plan(tmp_path, monkeypatch, call):
    def full(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ValueError, match="packing plan cannot be stored: No space left") as refusal:
        PackedWindows(MadeRows([1, 2, 3]), 64, tmp_path)
    assert refusal.value.args[1:] == (f"data.cache={tmp_path}", "make room there, or name another folder: data.cache=FOLDER")
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_a_cache_that_is_a_file_is_explained(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(ValueError, match="packing plan cannot be stored"):
        PackedWindows(MadeRows([1, 2, 3]), 64, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_serves_the_plans_it_has(tmp_path, monkeypatch):
    rows = MadeRows([1, 2, 3])
    PackedWindows(rows, 64, tmp_path)
    monkeypatch.setattr("data.packing.locked", None)
    monkeypatch.setattr(Path, "mkdir", None)
    assert len(PackedWindows(rows, 64, tmp_path)) == 1


def killed_while_packing(rows, cache):
    """In a forked child that kills itself before its plan is on the disk. Returns what it left."""
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        PackedWindows(rows, 64, cache)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    [left] = cache.glob(".*.tmp")
    return left


@pytest.mark.parametrize("capacity", [64, 32], ids=["the same plan", "another plan"])
def test_what_a_killed_process_left_is_removed(tmp_path, capacity):
    left = killed_while_packing(MadeRows([1, 2, 3]), tmp_path)
    PackedWindows(MadeRows([1, 2, 3]), capacity, tmp_path)
    assert not left.exists()


def test_what_somebody_is_writing_is_not_litter(tmp_path):
    left = killed_while_packing(MadeRows([1, 2, 3]), tmp_path)
    lock = tmp_path / f"{left.name[1:-4]}.lock"
    holds = f"import fcntl, sys; f = open({str(lock)!r}, 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        PackedWindows(MadeRows([1, 2, 3]), 32, tmp_path)
        assert left.exists()
        other.stdin.close()
    PackedWindows(MadeRows([1, 2, 3]), 16, tmp_path)
    assert not left.exists()


def test_a_plan_reaches_a_worker(tmp_path):
    packed = PackedWindows(MadeRows(list(range(1, 60))), 64, tmp_path)
    assert [row.name for row in pickle.loads(pickle.dumps(packed))[3]] == [row.name for row in packed[3]]


def test_rows_of_a_sorted_file_meet_in_windows(tmp_path):
    """20,000 rows in slices of 1,024: a window must not hold neighbours only."""
    packed = PackedWindows(MadeRows([10] * 20_000), 40, tmp_path)
    spread = [max(numbers) - min(numbers) for numbers in ([int(row.name[4:]) for row in packed[w]] for w in range(0, len(packed), 50))]
    assert np.median(spread) > 5_000


def test_an_epoch_of_windows_holds_every_row_once(tmp_path):
    packed = PackedWindows(MadeRows([1 + i % 37 for i in range(300)]), 64, tmp_path)
    assert sorted(name for step in names(loader(packed, packed=True).steps(0)) for name in step) == sorted(f"row:{i}" for i in range(300))
