import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from data.store.block import EncodedBlock, RowStats
from data.store.layout import STORE_FILES, STORE_MANIFEST, TABLE_FILES
from data.store.reader import OPEN_FILES, DamagedStoreError, TokenStore
from data.store.writer import StoreWriter

ROOT = Path(__file__).parents[2]
LARGEST = 6399
WIDE = 151_000


def block(rows, tally=None):
    """rows: [(place, weight, [(ids, [(start, stop), ...]) for each side]), ...]"""
    sequences = [sequence for _, _, sides in rows for sequence in sides]
    return EncodedBlock(
        tokens=np.array([token for ids, _ in sequences for token in ids], np.int32),
        lengths=np.array([len(ids) for ids, _ in sequences], np.int64),
        spans=np.array([span for _, spans in sequences for span in spans], np.int32).reshape(-1, 2),
        span_counts=np.array([len(spans) for _, spans in sequences], np.int64),
        places=np.array([place for place, _, _ in rows], np.int64),
        weights=np.array([weight for _, weight, _ in rows], np.float32),
        tally=tally or RowStats(read=len(rows), kept=len(rows)),
    )


def written(folder, *blocks, sides=1, largest_id=LARGEST):
    with StoreWriter(folder, sides, largest_id) as writer:
        for part in blocks:
            writer.append(part)
        writer.finish({"name": "rows.jsonl"})
    store = TokenStore.open(folder)
    assert store is not None
    return store


def read_back(store):
    """What `block` was made of."""
    rows = []
    for i in range(len(store)):
        sequences, place = store.read(i)
        sides = [(ids.tolist(), np.flatnonzero(np.diff(np.array([0, *learn.tolist(), 0]))).reshape(-1, 2).tolist()) for ids, learn in sequences]
        rows.append((place, float(store.weights(i, i + 1)[0]), [(ids, [tuple(span) for span in spans]) for ids, spans in sides]))
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
def sequence(draw):
    ids = draw(st.lists(st.integers(0, LARGEST), min_size=1, max_size=30))
    edges = draw(st.lists(st.integers(1, len(ids)), unique=True, max_size=8).map(sorted))  # touching spans would be read as one
    return ids, [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), sides=st.sampled_from([1, 2]), largest_id=st.sampled_from([LARGEST, WIDE]))
def test_what_is_appended_is_what_is_read(tmp_path_factory, data, sides, largest_id):
    row = st.tuples(st.integers(0, 2**62), st.floats(0, 1e6, width=32), st.lists(sequence(), min_size=sides, max_size=sides))
    parts = data.draw(st.lists(st.lists(row, max_size=5), max_size=4))
    store = written(tmp_path_factory.mktemp("cache") / "key", *map(block, parts), sides=sides, largest_id=largest_id)
    rows = [row for part in parts for row in part]
    assert read_back(store) == rows
    assert store.tally.read == len(rows)
    assert store.lengths(0, len(rows)).tolist() == [sum(len(ids) - 1 for ids, _ in sides) for _, _, sides in rows]
    assert store.has_weights == any(weight != 1 for _, weight, _ in rows)


def test_a_pair_keeps_its_sides_apart(tmp_path):
    store = written(tmp_path / "key", block(PAIRS), sides=2)
    assert read_back(store) == PAIRS
    assert store.lengths(0, 2).tolist() == [2 + 3, 3 + 1] and store.lengths(1, 2).tolist() == [3 + 1]


def test_lengths_and_weights_are_the_same_in_any_slices(tmp_path, monkeypatch):
    store = written(tmp_path / "key", block(ROWS), block(ROWS))
    whole = store.lengths(0, 6), store.weights(0, 6)
    monkeypatch.setattr("data.store.reader.ROWS_PER_READ", 4)
    assert whole[0].tolist() == store.lengths(0, 6).tolist() == [3, 5, 1] * 2
    assert whole[1].tolist() == store.weights(0, 6).tolist() == [1, 1, 0.5] * 2
    assert store.lengths(2, 2).tolist() == []


def test_a_token_takes_two_bytes_where_the_vocabulary_fits(tmp_path):
    for largest_id, size in ((65535, 2), (65536, 4)):
        written(tmp_path / str(size), block([(0, 1.0, [([largest_id], [])])]), largest_id=largest_id)
        assert (tmp_path / str(size) / "tokens.bin").stat().st_size == size


def test_an_id_outside_of_the_vocabulary_is_not_written(tmp_path):
    with pytest.raises(AssertionError, match="vocabulary"):
        written(tmp_path / "key", block([(0, 1.0, [([LARGEST + 1], [])])]))
    assert TokenStore.open(tmp_path / "key") is None and not list(tmp_path.iterdir())


def test_the_tally_and_the_facts_come_back(tmp_path):
    told = RowStats(
        read=5, kept=3, cut=1, tokens=12, lost=2, dropped=Counter({"too long": 1}), bad=Counter({"broken JSON": 1}), first={"broken JSON": "数据.jsonl:3:1"}
    )
    store = written(tmp_path / "key", block(ROWS, told))
    assert store.tally == told and isinstance(store.tally.bad, Counter)
    assert store.facts == {"name": "rows.jsonl"} and store.key == "key"


def test_no_row_beyond_the_last(tmp_path):
    store = written(tmp_path / "key", block(ROWS))
    for i in (-1, 3):
        with pytest.raises(IndexError):
            store.read(i)


def test_a_store_goes_to_another_process(tmp_path):
    store = written(tmp_path / "key", block(ROWS))
    again = pickle.loads(pickle.dumps(store))
    assert read_back(again) == ROWS
    sent, _ = pickle.dumps(store), store.read(0)
    os.rename(tmp_path / "key", tmp_path / "elsewhere")
    assert store.read(0)[1] == 3  # its files are open already
    with pytest.raises(DamagedStoreError, match="gone or damaged"):
        pickle.loads(sent)


def test_forked_children_read_at_once(tmp_path):
    store = written(tmp_path / "key", *[block([(i, 1.0, [([i, i + 1, i + 2], [(1, 3)])])]) for i in range(500)])
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            right = all(store.read(i)[1] == i and store.read(i)[0][0][0][0] == i for _ in range(4) for i in range(500))
            os._exit(0 if right else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]


MANY = """
import resource, sys
from pathlib import Path
from data.store import Store
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
stores = [Store.open(folder) for folder in sorted(Path(sys.argv[1]).iterdir())]
assert all(store.read(i)[1] == place for _ in range(2) for store in stores for i, place in enumerate((3, 4, 9)))
print(len(stores))
"""


def test_more_stores_than_a_process_may_open_files(tmp_path):
    for number in range(100):
        written(tmp_path / str(number), block(ROWS))
    words = [sys.executable, "-c", MANY, str(tmp_path)]
    told = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert told.stdout == "100\n" and len(os.listdir("/proc/self/fd")) < OPEN_FILES + 50


def test_a_store_that_was_deleted_says_so(tmp_path):
    store = written(tmp_path / "key", block(ROWS))
    shutil.rmtree(tmp_path / "key")
    with pytest.raises(DamagedStoreError, match="start again"):
        store.read(0)


def test_what_is_built_anew_is_read_and_not_what_stood_there(tmp_path):
    old = written(tmp_path / "key", block(ROWS))
    assert old.read(0)[1] == 3
    new = written(tmp_path / "key", block(ROWS[1:]))
    assert new.read(0)[1] == 4 and old.read(0)[1] == 3  # its files are open still


def test_a_store_that_may_not_be_read_is_explained(tmp_path, monkeypatch):
    written(tmp_path / "key", block(ROWS))

    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)  # no file is closed to root, who may run this
    with pytest.raises(ValueError, match="may not be read") as refusal:
        TokenStore.open(tmp_path / "key")
    assert refusal.value.args[1] == str(tmp_path / "key" / STORE_MANIFEST) and "chmod" in refusal.value.args[2] and "data.cache=" in refusal.value.args[2]


@pytest.mark.parametrize("name", ["key", f"key/{STORE_MANIFEST}", "key/tokens.bin", ".key.tmp"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_whatever_stands_in_the_way_is_replaced(tmp_path, name, kind):
    written(tmp_path / "key", block(ROWS))
    path = tmp_path / name
    if path.exists():
        path.rename(tmp_path / "old")
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to("nowhere")}[kind]()
    assert (TokenStore.open(tmp_path / "key") is None) == (name != ".key.tmp")
    assert read_back(written(tmp_path / "key", block(ROWS))) == ROWS


@pytest.mark.parametrize("name", [*STORE_FILES, STORE_MANIFEST])
@pytest.mark.parametrize("harm", ["cut", "longer", "empty", "gone"])
def test_a_torn_store_is_none(tmp_path, name, harm):
    written(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-1], "longer": raw + b"\0", "empty": b"", "gone": b""}[harm])
    if harm == "gone":
        path.unlink()
    assert TokenStore.open(tmp_path / "key") is None


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    written(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / STORE_MANIFEST
    raw = path.read_bytes()
    for at in range(len(raw)):
        harmed = bytearray(raw)
        harmed[at] ^= 1
        path.write_bytes(harmed)
        store = TokenStore.open(tmp_path / "key")
        assert store is None or raw[at : at + 1].isspace(), raw[at - 10 : at + 10]


@pytest.mark.parametrize("name", TABLE_FILES)
def test_no_plan_is_made_from_a_flipped_bit(tmp_path, name):
    """Lengths and weights stand in no row's checksum of their own."""
    written(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        harmed = bytearray(raw)
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        assert TokenStore.open(tmp_path / "key") is None
    path.write_bytes(raw)
    assert TokenStore.open(tmp_path / "key") is not None


def test_a_table_of_several_pieces_is_checked_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("data.store.reader.READ_CHUNK", 7)
    written(tmp_path / "key", block(ROWS))
    path = tmp_path / "key" / "rows.bin"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert TokenStore.open(tmp_path / "key") is None


def test_the_digest_follows_the_rows_and_nothing_else(tmp_path):
    same = written(tmp_path / "a", block(ROWS)), written(tmp_path / "b", block(ROWS[:1], RowStats(read=9)), block(ROWS[1:]))
    assert same[0].digest == same[1].digest and same[0].tally != same[1].tally
    others = [
        [(7, *ROWS[0][1:]), *ROWS[1:]],  # another place
        [(3, 2.0, ROWS[0][2]), *ROWS[1:]],  # weight
        [(3, 1.0, [([1, 5, 7, 2], [(1, 4)])]), *ROWS[1:]],  # token
        [(3, 1.0, [([1, 5, 6, 2], [(1, 3)])]), *ROWS[1:]],  # span
        [(3, 1.0, [([1, 5, 6], [(1, 3)])]), (4, 1.0, [([2, 1, 7, 8, 9, 9, 2], [(3, 4), (5, 7)])]), ROWS[2]],  # border
        [ROWS[1], ROWS[0], ROWS[2]],
        ROWS[:2],
    ]
    digests = {written(tmp_path / str(number), block(rows)).digest for number, rows in enumerate(others)}
    assert len(digests | {same[0].digest}) == len(others) + 1


@pytest.mark.parametrize(("sides", "rows"), [(1, ROWS), (2, PAIRS)])
@pytest.mark.parametrize("name", STORE_FILES)
def test_any_flipped_bit_is_found_before_its_row_is_used(tmp_path, name, sides, rows):
    store = written(tmp_path / "key", block(rows), sides=sides)
    path = tmp_path / "key" / name
    raw = path.read_bytes()
    for bit in range(8 * len(raw)):
        harmed = bytearray(raw)
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)  # in place: the store that is open sees it
        with pytest.raises(DamagedStoreError, match=f"{tmp_path / 'key'} is damaged"):
            read_back(store)
    path.write_bytes(raw)
    assert read_back(store) == rows


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)


def test_a_damaged_store_is_built_again_at_the_next_start(tmp_path):
    store = written(tmp_path / "key", block(ROWS))
    flip(tmp_path / "key" / "tokens.bin")
    with pytest.raises(DamagedStoreError, match="start again"):
        store.read(0)
    assert TokenStore.open(tmp_path / "key") is None
    with pytest.raises(DamagedStoreError, match="start again"):
        store.read(0)  # as other processes do that hold it


def test_a_damaged_store_that_cannot_be_taken_away_is_to_be_deleted(tmp_path, monkeypatch):
    store = written(tmp_path / "key", block(ROWS))
    flip(tmp_path / "key" / "tokens.bin")

    def refused(*words, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(DamagedStoreError, match=r"delete that folder \(Read-only file system\)"):
        store.read(0)


def test_damage_keeps_its_name_on_the_way_out_of_a_worker(tmp_path):
    store = written(tmp_path / "key", block(ROWS))
    flip(tmp_path / "key" / "tokens.bin")
    with pytest.raises(DamagedStoreError, match="row 0 of the token store"):
        list(DataLoader(range(1), num_workers=1, collate_fn=lambda rows: store.read(rows[0])))


def test_another_format_is_built_again(tmp_path, monkeypatch):
    written(tmp_path / "key", block(ROWS))
    monkeypatch.setattr("data.store.FORMAT", 10**6)
    assert TokenStore.open(tmp_path / "key") is None


def test_nothing_is_there_before_the_end(tmp_path):
    with StoreWriter(tmp_path / "key", 1, LARGEST) as writer:
        writer.append(block(ROWS))
        assert TokenStore.open(tmp_path / "key") is None
    assert not list(tmp_path.iterdir())  # left without finish


def test_a_new_store_takes_the_place_of_a_torn_one(tmp_path):
    written(tmp_path / "key", block(ROWS))
    (tmp_path / "key" / "rows.bin").unlink()
    assert read_back(written(tmp_path / "key", block(ROWS[:1]))) == ROWS[:1]
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


RESIDENT = """
import os, sys
from pathlib import Path
import numpy as np
from data.store import Store
store = Store.open(Path(sys.argv[1]))
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
def test_reading_everywhere_in_200_mb_takes_no_memory(tmp_path):
    tokens = np.random.default_rng(0).integers(0, LARGEST, 500 * 1000).astype(np.int32)
    same = np.full(1000, 500, np.int64)
    part = EncodedBlock(
        tokens, same, np.tile(np.array([[1, 500]], np.int32), (1000, 1)), np.ones(1000, np.int64), np.arange(1000), np.ones(1000, np.float32), RowStats()
    )
    store = written(tmp_path / "key", *[part] * 200)
    assert sum((tmp_path / "key" / name).stat().st_size for name in STORE_FILES) > 200e6 and len(store) == 200_000
    told = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(store.folder)], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert int(told.stdout) < 50, f"{told.stdout} MiB more"
