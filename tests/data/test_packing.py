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
from row_fixtures import RandomRows, make_loader, names_of

from common.errors import UserError
from common.filesystem import fs
from data.batching import packing
from data.batching.batch import IGNORE_INDEX, collate
from data.batching.packing import PackedSequences, best_fit_plan, count_sequences, read_slices
from data.store.cache import no_progress

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)
ROWS = RandomRows(list(range(1, 60)))


@settings(max_examples=50)
@given(lengths=LENGTHS)
def test_best_fit_has_every_row_once_and_exceeds_no_capacity(lengths):
    sequences = best_fit_plan(np.array(lengths), 64)
    assert sorted(i for sequence in sequences for i in sequence) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in sequence) for sequence in sequences) <= 64


@settings(max_examples=50)
@given(lengths=LENGTHS)
def test_best_fit_needs_at_most_eleven_ninths_of_the_minimum(lengths):
    minimum = max(-(-sum(lengths) // 64), sum(length > 32 for length in lengths))
    assert len(best_fit_plan(np.array(lengths), 64)) <= max(11 / 9 * minimum + 6 / 9, 1)


def test_best_fit_rejects_a_row_above_the_capacity():
    with pytest.raises(ValueError, match="65 tokens"):
        best_fit_plan(np.array([3, 65]), 64)


@settings(max_examples=10)
@given(lengths=LENGTHS, per_row=st.sampled_from([1, 2]))
def test_packed_batch_has_the_tokens_and_labels_of_unpacked_ones(tmp_path_factory, lengths, per_row):
    rows = RandomRows([max(length, per_row) for length in lengths], per_row)
    packed = PackedSequences(rows, 64, tmp_path_factory.mktemp("cache"))
    labelled = []
    for is_packed, sequences in (
        (True, [packed[i] for i in range(len(packed))]),
        (False, [[rows[i]] for i in range(len(rows))]),
    ):
        batch = collate(sequences, pad_id=0, packed=is_packed)
        ids, labels = batch.input_ids.numpy(), batch.labels.numpy()
        labelled.append(
            sorted(zip(ids[labels != IGNORE_INDEX].tolist(), labels[labels != IGNORE_INDEX].tolist(), strict=True))
        )
        assert sorted(batch.lengths.tolist()) == sorted(
            len(sequence.ids) - 1 for i in range(len(rows)) for sequence in rows[i].sequences
        )
        assert batch.num_supervised_tokens == sum(
            int(sequence.loss_mask[1:].sum()) for i in range(len(rows)) for sequence in rows[i].sequences
        )
        assert sorted(batch.names) == sorted(f"row:{i}" for i in range(len(rows)))
    assert labelled[0] == labelled[1]


def test_packed_positions_restart_per_document_and_padding_has_none():
    rows = RandomRows([3, 2, 4])
    batch = collate([[rows[0], rows[1]], [rows[2]]], pad_id=9, packed=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, 2, -1, -1, -1, -1]]
    assert (batch.input_ids[batch.document_ids == -1] == 9).all() and (
        batch.labels[batch.document_ids == -1] == IGNORE_INDEX
    ).all()


def test_packed_pairs_number_all_chosen_before_all_rejected():
    rows = RandomRows([4, 6], sequences_per_row=2)
    batch = collate([[rows[0], rows[1]]], pad_id=0, packed=True)
    assert batch.document_ids[0, :10].tolist() == [0, 0, 2, 2, 1, 1, 1, 3, 3, 3]
    assert batch.lengths.tolist() == [2, 3, 2, 3]


def test_packing_plan_is_read_from_the_cache_the_second_time(tmp_path, monkeypatch):
    first = PackedSequences(ROWS, 64, tmp_path)
    monkeypatch.setattr(packing, "read_slices", None)  # a second plan would call it
    again = PackedSequences(ROWS, 64, tmp_path)
    assert [[row.name for row in again[i]] for i in range(len(again))] == [
        [row.name for row in first[i]] for i in range(len(first))
    ]
    assert again.fingerprint == first.fingerprint and again.fill_ratio == first.fill_ratio == sum(range(1, 60)) / (
        len(first) * 64
    )


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-8], lambda raw: raw[:40] + bytes([raw[40] ^ 1]) + raw[41:], lambda raw: b""],
    ids=["cut", "flipped bit", "empty"],
)
def test_packing_plan_that_is_damaged_is_closed_and_made_again(tmp_path, damage):
    path = PackedSequences(ROWS, 64, tmp_path).path
    plan = path.with_name(f"{path.name}@0-0")
    open_files = len(os.listdir("/proc/self/fd"))
    for file in (path, plan):
        intact = file.read_bytes()
        file.write_bytes(damage(intact))
        assert len(PackedSequences(ROWS, 64, tmp_path)) and file.read_bytes() == intact
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, f"{path.name}.lock", plan.name])


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_packing_plan_on_a_full_disk_is_a_user_error_and_leaves_nothing(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fs, call, full, raising=False)
    with pytest.raises(UserError, match="packing plan cannot be stored: No space left") as error:
        PackedSequences(ROWS, 64, tmp_path)
    assert error.value.setting == f"data.cache={tmp_path}" and "data.cache=FOLDER" in error.value.fix
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_packing_plan_in_a_cache_that_is_a_file_is_a_user_error(tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="packing plan cannot be stored"):
        PackedSequences(ROWS, 64, tmp_path / "cache")


def test_packing_plan_is_read_from_a_read_only_cache(tmp_path, monkeypatch):
    plan = PackedSequences(ROWS, 64, tmp_path)
    (tmp_path / f"{plan.path.name}.lock").unlink()
    monkeypatch.setattr(Path, "mkdir", None)
    assert len(PackedSequences(ROWS, 64, tmp_path)) == len(plan)
    assert sorted(os.listdir(tmp_path)) == [plan.path.name, f"{plan.path.name}@0-0"]


def killed_while_packing(cache) -> Path:
    """Fork a child that kills itself before its plan is complete; return the temporary file it leaves."""
    pid = os.fork()
    if pid == 0:
        fs.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        PackedSequences(ROWS, 64, cache)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    [temp] = cache.glob(".tmp-*")
    return temp


@pytest.mark.parametrize("capacity", [64, 60], ids=["the same plan", "another plan"])
def test_packing_removes_what_a_killed_process_left(tmp_path, capacity):
    temp = killed_while_packing(tmp_path)
    PackedSequences(ROWS, capacity, tmp_path)
    assert not temp.exists()


def test_packing_keeps_what_another_process_is_writing(tmp_path):
    temp = killed_while_packing(tmp_path)
    [lock] = tmp_path.glob("*.lock")
    code = f"import fcntl, sys; f = open({str(lock)!r}, 'ab'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        PackedSequences(ROWS, 60, tmp_path)
        assert temp.exists()
        other.stdin.close()
    PackedSequences(ROWS, 61, tmp_path)
    assert not temp.exists()


def test_packed_sequences_can_be_pickled(tmp_path):
    packed = PackedSequences(ROWS, 64, tmp_path)
    for i in (3, 3 + len(packed)):
        assert [row.name for row in pickle.loads(pickle.dumps(packed))[i]] == [row.name for row in packed[i]]


class RepeatedRows(RandomRows):
    """Row i is a copy of row i // copies."""

    def __init__(self, lengths: list[int], copies: int) -> None:
        super().__init__([length for length in lengths for _ in range(copies)])
        self.copies, self.fingerprint = copies, f"{copies} copies of {lengths}"

    def distinct(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) // self.copies


def plan_of(packed: PackedSequences, epoch: int) -> list[list[int]]:
    """Return the row numbers of each sequence of an epoch."""
    return [[int(row.name[4:]) for row in packed[epoch * len(packed) + i]] for i in range(len(packed))]


def neighbours(plan: list[list[int]]) -> set[tuple[int, int]]:
    return {(a, b) for sequence in plan for a in sequence for b in sequence if a < b}


@pytest.mark.slow
@settings(max_examples=30)
@given(lengths=LENGTHS, copies=st.integers(1, 9), seed=st.integers(0, 3), epoch=st.integers(0, 5))
def test_packed_epoch_has_every_row_once_and_never_two_copies_in_a_sequence(
    tmp_path_factory, lengths, copies, seed, epoch
):
    packed = PackedSequences(RepeatedRows(lengths, copies), 64, tmp_path_factory.mktemp("cache"), seed)
    plan = plan_of(packed, epoch)
    assert sorted(row for sequence in plan for row in sequence) == list(range(len(lengths) * copies))
    assert max(sum(lengths[row // copies] for row in sequence) for sequence in plan) <= 64
    assert all(len({row // copies for row in sequence}) == len(sequence) for sequence in plan)


def test_packing_of_copies_fills_the_sequences_with_other_rows(tmp_path):
    packed = PackedSequences(RepeatedRows([5 + i % 23 for i in range(200)], 10), 64, tmp_path)
    assert packed.fill_ratio > 0.98


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [([5 + i % 60 for i in range(600)], 256), (list(range(1000, 3000, 10)), 8192)],
    ids=["common lengths", "unique lengths"],
)
def test_packing_plan_of_each_epoch_is_another_one(tmp_path, lengths, capacity):
    packed = PackedSequences(RandomRows(lengths), capacity, tmp_path)
    pairs = [neighbours(plan_of(packed, epoch)) for epoch in range(4)]
    assert all(len(one & other) < 0.3 * len(one) for one, other in zip(pairs, pairs[1:], strict=False))
    assert neighbours(plan_of(PackedSequences(packed.rows, capacity, tmp_path, seed=1), 0)) != pairs[0]


def test_packing_plan_is_a_function_of_seed_and_epoch(tmp_path):
    first, second = (PackedSequences(ROWS, 64, tmp_path / name, seed=5) for name in ("a", "b"))
    plans = [plan_of(first, epoch) for epoch in range(5)]
    assert [plan_of(second, epoch) for epoch in (4, 1, 0, 3)] == [plans[epoch] for epoch in (4, 1, 0, 3)]


@settings(max_examples=30)
@given(lengths=LENGTHS, copies=st.integers(1, 4), bits=st.integers(0, 2**32))
def test_packing_without_noise_has_as_many_sequences_for_every_draw(lengths, copies, bits):
    [part] = read_slices(RepeatedRows(lengths, copies), no_progress)
    drawn = np.random.default_rng(bits).integers(0, 2**63, len(part.copies)).astype(np.uint64)
    assert len(part.plan(64, 0.0, drawn)) == count_sequences(part, 64)  # below 1000 sequences none are added


def test_packing_plan_files_of_earlier_epochs_are_removed(tmp_path):
    packed = PackedSequences(ROWS, 64, tmp_path)
    for epoch in range(6):
        plan_of(packed, epoch)
    assert sorted(path.name.partition("@")[2] for path in tmp_path.glob("*@*")) == ["0-0", "0-4", "0-5"]


def test_packing_plan_of_a_later_epoch_is_in_memory_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    packed, expected = PackedSequences(ROWS, 64, tmp_path / "full"), PackedSequences(ROWS, 64, tmp_path / "free")
    plans = [plan_of(expected, epoch) for epoch in range(3)]
    monkeypatch.setattr(fs, "write", full)
    assert [plan_of(packed, epoch) for epoch in range(3)] == plans


def test_loader_reads_another_packing_plan_in_each_epoch(tmp_path):
    packed = PackedSequences(ROWS, 64, tmp_path)
    loader = make_loader(packed, batch_size=1)
    for epoch in (0, 2):
        steps = [sorted(names) for names in names_of(loader.iter_epoch(epoch))]
        assert sorted(steps) == sorted(sorted(f"row:{row}" for row in sequence) for sequence in plan_of(packed, epoch))
    resumed = names_of(loader.iter_steps(len(packed) - 1, len(packed) + 2))
    assert resumed == names_of(loader.iter_steps(0, 3 * len(packed)))[len(packed) - 1 : len(packed) + 2]


def test_packing_mixes_distant_rows_of_a_sorted_file(tmp_path):
    """20,000 rows in chunks of 1,024 adjacent ones: the rows of a sequence must not all be neighbours."""
    packed = PackedSequences(RandomRows([10] * 20_000), 40, tmp_path)
    spread = [
        max(numbers) - min(numbers)
        for numbers in ([int(row.name[4:]) for row in packed[i]] for i in range(0, len(packed), 50))
    ]
    assert np.median(spread) > 5_000


def test_epoch_of_packed_sequences_has_every_row_once(tmp_path):
    packed = PackedSequences(RandomRows([1 + i % 37 for i in range(300)]), 64, tmp_path)
    assert sorted(name for step in names_of(make_loader(packed).iter_epoch(0)) for name in step) == sorted(
        f"row:{i}" for i in range(300)
    )
