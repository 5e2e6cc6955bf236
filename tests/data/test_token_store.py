import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from common.errors import UserError
from data.store.reader import STORE_FILES, STORE_MANIFEST, TABLE_FILES, DamagedStoreError, TokenStore
from data.store.writer import write_store
from data.tokenize.block import EncodedBlock, RowStats

ROOT = Path(__file__).parents[2]
LARGEST = 6399
WIDE = 151_000


def block(rows, stats=None):
    """rows: [(position, weight, [(ids, [(start, stop), ...]), ...one or two sequences]), ...]"""
    labelled = [
        (
            position,
            weight,
            [(np.array(ids, np.int32).tobytes(), [(*span, 1.0) for span in spans]) for ids, spans in sequences],
        )
        for position, weight, sequences in rows
    ]
    return EncodedBlock(labelled, stats or RowStats(read=len(rows), kept=len(rows)))


def build_store(folder, *blocks, sequences_per_row=1, largest_id=LARGEST):
    with write_store(folder, sequences_per_row, largest_id, {"name": "rows.jsonl"}) as writer:
        for part in blocks:
            writer.append(part)
    store = TokenStore.open(folder)
    assert store is not None
    return store


def read_back(store):
    """Return the rows from which `block` was made."""
    rows = []
    for i in range(len(store)):
        sequences, position = store.read(i)
        spans = [
            np.flatnonzero(np.diff(np.array([0, *loss_mask.tolist(), 0]))).reshape(-1, 2).tolist()
            for _, loss_mask in sequences
        ]
        rows.append(
            (
                position,
                float(store.column("weight", i, i + 1)[0]),
                [(ids.tolist(), list(map(tuple, each))) for (ids, _), each in zip(sequences, spans, strict=True)],
            )
        )
    return rows


ROWS = [
    (3, 1.0, [([1, 5, 6, 2], [(1, 4)])]),
    (4, 1.0, [([1, 7, 8, 9, 9, 2], [(2, 3), (4, 6)])]),
    (9, 0.5, [([1, 2], [(1, 2)])]),
]
PAIRS = [
    (0, 1.0, [([1, 5, 2], [(1, 3)]), ([1, 5, 6, 2], [(2, 4)])]),
    (1, 2.0, [([1, 7, 7, 2], []), ([1, 8], [(1, 2)])]),
]


@st.composite
def sequences(draw):
    ids = draw(st.lists(st.integers(0, LARGEST), min_size=1, max_size=30))
    # adjacent spans would be read as one
    edges = draw(st.lists(st.integers(1, len(ids)), unique=True, max_size=8).map(sorted))
    return ids, [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data(), per_row=st.sampled_from([1, 2]), largest_id=st.sampled_from([LARGEST, WIDE]))
def test_store_returns_the_rows_that_were_appended(tmp_path_factory, data, per_row, largest_id):
    row = st.tuples(
        st.integers(0, 2**62), st.floats(0, 1e6, width=32), st.lists(sequences(), min_size=per_row, max_size=per_row)
    )
    parts = data.draw(st.lists(st.lists(row, max_size=5), max_size=4))
    store = build_store(
        tmp_path_factory.mktemp("cache") / "key", *map(block, parts), sequences_per_row=per_row, largest_id=largest_id
    )
    rows = [row for part in parts for row in part]
    assert read_back(store) == rows
    assert store.stats.read == len(rows)
    assert store.lengths(0, len(rows)).tolist() == [sum(len(ids) - 1 for ids, _ in each) for _, _, each in rows]
    assert store.has_weights == any(weight != 1 for _, weight, _ in rows)


def test_store_keeps_chosen_and_rejected_apart(tmp_path):
    store = build_store(tmp_path / "key", block(PAIRS), sequences_per_row=2)
    assert read_back(store) == PAIRS
    assert store.lengths(0, 2).tolist() == [2 + 3, 3 + 1] and store.lengths(1, 2).tolist() == [3 + 1]


def test_store_lengths_and_weights_do_not_depend_on_the_read_size(tmp_path, monkeypatch):
    store = build_store(tmp_path / "key", block(ROWS), block(ROWS))
    whole = store.lengths(0, 6), store.column("weight", 0, 6)
    monkeypatch.setattr("data.store.reader.ROWS_PER_READ", 4)
    assert whole[0].tolist() == store.lengths(0, 6).tolist() == [3, 5, 1] * 2
    assert whole[1].tolist() == store.column("weight", 0, 6).tolist() == [1, 1, 0.5] * 2
    assert store.lengths(2, 2).tolist() == []


def test_store_uses_two_bytes_per_token_if_the_vocabulary_fits(tmp_path):
    for largest_id, size in ((65535, 2), (65536, 4)):
        build_store(tmp_path / str(size), block([(0, 1.0, [([largest_id], [])])]), largest_id=largest_id)
        assert (tmp_path / str(size) / "tokens.bin").stat().st_size == size


def test_store_writer_rejects_an_id_outside_of_the_vocabulary(tmp_path):
    with pytest.raises(AssertionError, match="vocabulary"):
        build_store(tmp_path / "key", block([(0, 1.0, [([LARGEST + 1], [])])]))
    assert TokenStore.open(tmp_path / "key") is None and not list(tmp_path.iterdir())


def test_store_returns_its_stats_and_metadata(tmp_path):
    counts = {
        "dropped": Counter({"too long": 1}),
        "bad": Counter({"invalid JSON": 1}),
        "first_seen": {"invalid JSON": "数据.jsonl:3:1"},
    }
    stats = RowStats(read=5, kept=3, truncated=1, tokens=12, lost_loss_tokens=2, **counts)
    store = build_store(tmp_path / "key", block(ROWS, stats))
    assert store.stats == stats and isinstance(store.stats.bad, Counter)
    assert store.metadata == {"name": "rows.jsonl"} and store.key == "key"


def test_store_rejects_an_index_out_of_range(tmp_path):
    store = build_store(tmp_path / "key", block(ROWS))
    for i in (-1, 3):
        with pytest.raises(IndexError):
            store.read(i)


def test_store_can_be_pickled(tmp_path):
    store = build_store(tmp_path / "key", block(ROWS))
    again = pickle.loads(pickle.dumps(store))
    assert read_back(again) == ROWS
    pickled, _ = pickle.dumps(store), store.read(0)
    os.rename(tmp_path / "key", tmp_path / "renamed")
    assert store.read(0)[1] == 3  # its files are open already
    with pytest.raises(DamagedStoreError, match="gone or damaged"):
        pickle.loads(pickled)


@pytest.mark.slow
def test_store_is_read_by_forked_children_at_once(tmp_path):
    store = build_store(tmp_path / "key", block([(i, 1.0, [([i, i + 1, i + 2], [(1, 3)])]) for i in range(500)]))
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            is_correct = all(
                store.read(i)[1] == i and store.read(i)[0][0][0][0] == i for _ in range(4) for i in range(500)
            )
            os._exit(0 if is_correct else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


def run_python(code, argument):
    return subprocess.run(
        [sys.executable, "-c", code, str(argument)], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout


MANY = """
import resource, sys
from pathlib import Path
from data.store.reader import TokenStore
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
stores = [TokenStore.open(folder) for folder in sorted(Path(sys.argv[1]).iterdir())]
assert all(store.read(i)[1] == position for _ in range(2) for store in stores for i, position in enumerate((3, 4, 9)))
print(len(stores))
"""


@pytest.mark.slow
def test_stores_may_outnumber_the_files_a_process_can_open(tmp_path):
    build_store(tmp_path / "0", block(ROWS))
    for number in range(1, 100):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    assert run_python(MANY, tmp_path) == "100\n"


def test_store_that_was_deleted_is_a_damaged_store(tmp_path):
    store = build_store(tmp_path / "key", block(ROWS))
    shutil.rmtree(tmp_path / "key")
    with pytest.raises(DamagedStoreError, match="start again"):
        store.read(0)


def test_store_that_is_rebuilt_is_read_and_open_ones_stay_valid(tmp_path):
    old = build_store(tmp_path / "key", block(ROWS))
    assert old.read(0)[1] == 3
    new = build_store(tmp_path / "key", block(ROWS[1:]))
    assert new.read(0)[1] == 4 and old.read(0)[1] == 3  # its files are open still


def test_store_without_read_permission_is_a_user_error(tmp_path, monkeypatch):
    build_store(tmp_path / "key", block(ROWS))

    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)  # chmod has no effect for root
    with pytest.raises(UserError, match="no permission to read") as error:
        TokenStore.open(tmp_path / "key")
    assert (
        error.value.setting == str(tmp_path / "key" / STORE_MANIFEST)
        and "chmod" in error.value.fix
        and "data.cache=" in error.value.fix
    )


@pytest.mark.parametrize("name", ["key", f"key/{STORE_MANIFEST}", "key/tokens.bin"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_store_replaces_any_file_with_its_name(tmp_path, name, kind):
    build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / name
    path.rename(tmp_path / "old")
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("missing")}[kind]()
    assert TokenStore.open(tmp_path / "key") is None
    assert read_back(build_store(tmp_path / "key", block(ROWS))) == ROWS


@pytest.mark.parametrize("name", [*STORE_FILES, STORE_MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "longer", "empty", "missing"])
def test_store_with_a_cut_or_missing_file_is_not_opened(tmp_path, name, damage):
    build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-1], "longer": raw + b"\0", "empty": b"", "missing": b""}[damage])
    if damage == "missing":
        path.unlink()
    assert TokenStore.open(tmp_path / "key") is None


def test_store_with_a_flipped_bit_in_the_manifest_is_not_opened(tmp_path):
    build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / STORE_MANIFEST
    raw = path.read_bytes()
    for i in range(len(raw)):
        damaged = bytearray(raw)
        damaged[i] ^= 1
        path.write_bytes(damaged)
        assert TokenStore.open(tmp_path / "key") is None, raw[i - 10 : i + 10]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE_FILES)
def test_store_with_a_flipped_bit_in_a_table_is_not_opened(tmp_path, name):
    """Packing plans are made from lengths and weights, without reading the rows and their checksums."""
    build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert TokenStore.open(tmp_path / "key") is None
    path.write_bytes(raw)
    assert TokenStore.open(tmp_path / "key") is not None


def test_store_verifies_tables_longer_than_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr("common.filesystem.CHUNK_BYTES", 7)
    build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / "rows.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert TokenStore.open(tmp_path / "key") is None


def test_store_digest_depends_on_the_rows_alone(tmp_path):
    same = (
        build_store(tmp_path / "a", block(ROWS)),
        build_store(tmp_path / "b", block(ROWS[:1], RowStats(read=9)), block(ROWS[1:])),
    )
    assert same[0].digest == same[1].digest and same[0].stats != same[1].stats
    others = [
        [(7, *ROWS[0][1:]), *ROWS[1:]],  # position
        [(3, 2.0, ROWS[0][2]), *ROWS[1:]],  # weight
        [(3, 1.0, [([1, 5, 7, 2], [(1, 4)])]), *ROWS[1:]],  # token
        [(3, 1.0, [([1, 5, 6, 2], [(1, 3)])]), *ROWS[1:]],  # span
        [(3, 1.0, [([1, 5, 6], [(1, 3)])]), (4, 1.0, [([2, 1, 7, 8, 9, 9, 2], [(3, 4), (5, 7)])]), ROWS[2]],  # length
        [ROWS[1], ROWS[0], ROWS[2]],
        ROWS[:2],
    ]
    digests = {build_store(tmp_path / str(number), block(rows)).digest for number, rows in enumerate(others)}
    assert len(digests | {same[0].digest}) == len(others) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("per_row", "rows"), [(1, ROWS), (2, PAIRS)], ids=["rows", "pairs"])
@pytest.mark.parametrize("name", STORE_FILES)
def test_store_finds_any_flipped_bit_when_it_reads_the_row(tmp_path, name, per_row, rows):
    store = build_store(tmp_path / "key", block(rows), sequences_per_row=per_row)
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)  # in place: the open store reads it
        with pytest.raises(DamagedStoreError, match=f"{tmp_path / 'key'} is damaged"):
            read_back(store)
    path.write_bytes(raw)
    assert read_back(store) == rows


@pytest.fixture
def damaged_store(tmp_path):
    store = build_store(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / "tokens.bin"
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    return store


def test_store_found_damaged_is_not_opened_again(damaged_store):
    with pytest.raises(DamagedStoreError, match="start again"):
        damaged_store.read(0)
    assert TokenStore.open(damaged_store.folder) is None
    with pytest.raises(DamagedStoreError, match="start again"):
        damaged_store.read(0)  # as another process with the open store would


def test_store_found_damaged_on_a_read_only_disk_says_to_delete_it(damaged_store, monkeypatch):

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(DamagedStoreError, match=r"delete that folder \(Read-only file system\)"):
        damaged_store.read(0)


def test_damaged_store_error_keeps_its_type_through_a_loader_worker(damaged_store):
    with pytest.raises(DamagedStoreError, match="row 0 of the token store"):
        list(DataLoader(range(1), num_workers=1, collate_fn=lambda rows: damaged_store.read(rows[0])))


def test_store_of_another_format_is_not_opened(tmp_path, monkeypatch):
    build_store(tmp_path / "key", block(ROWS))
    monkeypatch.setattr("data.store.reader.STORE_FORMAT", 10**6)
    assert TokenStore.open(tmp_path / "key") is None


def test_store_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), write_store(tmp_path / "key", 1, LARGEST, {}) as writer:
        writer.append(block(ROWS))
        assert TokenStore.open(tmp_path / "key") is None
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_store_replaces_an_incomplete_one(tmp_path):
    build_store(tmp_path / "key", block(ROWS))
    (tmp_path / "key" / "rows.bin").unlink()
    assert read_back(build_store(tmp_path / "key", block(ROWS[:1]))) == ROWS[:1]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


RESIDENT = """
import os, sys
from pathlib import Path
import numpy as np
from data.store.reader import TokenStore
store = TokenStore.open(Path(sys.argv[1]))
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
picks = np.random.default_rng(0).integers(0, len(store), 100_000).tolist()
store.read(0), store.lengths(0, 1)
before = resident()
for i in picks:
    store.read(i)
store.lengths(0, len(store))
print(resident() - before)
"""


@pytest.mark.slow
def test_store_of_200_mb_is_read_without_resident_memory(tmp_path):
    tokens = np.random.default_rng(0).integers(0, LARGEST, 500 * 1000).astype(np.int32)
    rows = [(i, 1.0, [(ids.tobytes(), [(1, 500, 1.0)])]) for i, ids in enumerate(tokens.reshape(1000, 500))]
    part = EncodedBlock(rows, RowStats())
    store = build_store(tmp_path / "key", *[part] * 200)
    assert sum((tmp_path / "key" / name).stat().st_size for name in STORE_FILES) > 200e6 and len(store) == 200_000
    mebibytes = int(run_python(RESIDENT, store.folder))
    assert mebibytes < 50


weighted_spans = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1.0, 0.5, 3.0, 0.1, 1e-9, 1e9])), max_size=5)


@settings(max_examples=25)
@given(rows=st.lists(st.lists(weighted_spans, min_size=2, max_size=2), max_size=4))
def test_store_returns_the_loss_weights_of_spans(tmp_path_factory, rows):
    rows, expected = [], []
    for position, row in enumerate(rows):
        sequences = []
        for spans in row:
            weights, triples = [0.0], []
            for length, weight in spans:
                triples.append((len(weights), len(weights) + length, weight))
                weights += [weight] * length
            sequences.append((np.arange(len(weights), dtype=np.int32).tobytes(), triples))
            expected.append(np.array(weights, np.float32))
        rows.append((position, 1.0, sequences))
    part = EncodedBlock(rows, RowStats())
    store = build_store(tmp_path_factory.mktemp("cache") / "key", part, sequences_per_row=2)
    masks = [mask for i in range(len(store)) for _, mask in store.read(i)[0]]
    assert [mask.astype(np.float32).tolist() for mask in masks] == [each.tolist() for each in expected]
    assert [mask.dtype == bool for mask in masks] == [bool(np.isin(each, (0, 1)).all()) for each in expected]


def test_store_without_fractional_weights_has_pairs_only(tmp_path):
    rows = [(0, 1.0, [(np.arange(6, dtype=np.int32).tobytes(), [(1, 3, 1.0), (4, 6, 1.0)])])]
    store = build_store(tmp_path / "key", EncodedBlock(rows, RowStats()))
    assert np.fromfile(store.folder / "spans.bin", "<u4").tolist() == [1, 3, 4, 6]
