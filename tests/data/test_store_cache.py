import ast
import dataclasses
import errno
import gzip
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from common import paths
from common.errors import UserError
from common.file_lock import is_file_locked
from common.filesystem import fs
from data.sources.files import ReadOptions, Source
from data.store import cache as cache_module
from data.store.cache import file_sha256_cached, load_or_build
from data.store.reader import STORE_FILES, STORE_MANIFEST, TokenStore
from data.tokenize.tokenizer import Tokenizer
from data.types import BadRowError, EncodingConfig
from runner.engine.device.compile import set_inductor_cache

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "data" / "samples" / "tokenizer"
TEXT = EncodingConfig("text", "text", SHIPPED, max_length=16, too_long="split", loss_on="assistant", on_bad_row="error")
SKIP = dataclasses.replace(TEXT, on_bad_row="skip")


def texts(count, start=0):
    return [{"text": f"row {i}: 天地玄黄 " + "again " * (i % 40)} for i in range(start, start + count)]


def lines(rows):
    return [json.dumps(row).encode() + b"\n" for row in rows]


def content_of(store):
    return {name: (store.folder / name).read_bytes() for name in [*STORE_FILES, STORE_MANIFEST]}


def keys_in(cache):
    return (
        sorted(path.name for path in cache.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name))
        if cache.exists()
        else []
    )


def temporary_in(cache):
    return list(cache.glob(".tmp-*"))


@pytest.fixture
def load(tmp_path, tokenizer):
    """load(path, encoding) loads or builds the store of a file in a cache of this test."""
    return lambda path, encoding=TEXT, cache=tmp_path / "cache", **options: load_or_build(
        Source.open(path), encoding, tokenizer, cache, **options
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_CHUNK_ROWS", 8)
    monkeypatch.setattr(cache_module, "REPORT_EVERY", 0)


def start_building(path, cache, before="", num_workers=1, progress="no_progress"):
    """Start a process that builds the store of `path`; `before` is code that it runs first."""
    code = f"""
import os, sys, time, signal
from pathlib import Path
from data.store import cache as cache_module
from data.store.cache import load_or_build, no_progress
from data.sources.files import Source
from data.types import EncodingConfig
from data.tokenize.tokenizer import Tokenizer
cache_module.MAX_CHUNK_ROWS, cache_module.REPORT_EVERY = 20, 0
{before}
encoding = EncodingConfig("text", "text", Path({str(SHIPPED)!r}), max_length=16, too_long="split", loss_on="assistant", on_bad_row="error")
store = load_or_build(Source.open({str(path)!r}), encoding, Tokenizer.load(encoding.tokenizer), Path({str(cache)!r}), {progress}, {num_workers})
print(store.key, len(store))
"""
    # In a process group of its own: a test may send signals to it.
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def test_store_is_built_once_per_file(write, load, monkeypatch):
    path = write(texts(50))
    first = load(path)
    os.utime(path, (1, 1))
    monkeypatch.setattr(cache_module, "encode_in_parallel", None)
    again = load(path)
    assert again.key == first.key and again.stats == first.stats and again.stats.read == 50
    assert again.read(7)[0][0][0].tolist() == first.read(7)[0][0][0].tolist()


def test_store_has_all_text_of_the_file(write, load, tokenizer):
    store = load(write(texts(30)))
    ids_of = {}
    for i in range(len(store)):
        [(ids, loss_mask)], position = store.read(i)
        assert loss_mask.tolist() == [False] + [True] * (len(ids) - 1)
        # parts of a text overlap by one token
        ids_of[position] = ids_of.get(position, [tokenizer.bos_id]) + ids[1:].tolist()
    assert [tokenizer.decode(ids) for ids in ids_of.values()] == [row["text"] for row in texts(30)]
    assert list(ids_of) == list(range(1, 31))


def test_store_has_the_same_bytes_for_any_number_of_workers(tmp_path, write, load, small_chunks):
    rows = lines(texts(100))
    rows[5] = rows[50] = b'{"text": 1}\n'
    rows[77] = b"{\n"
    path = write(b"".join(rows))
    alone, by_two = (content_of(load(path, SKIP, tmp_path / str(workers), num_workers=workers)) for workers in (1, 2))
    assert alone == by_two


def test_store_of_a_small_file_is_built_without_processes(write, load, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert load(write(texts(50))).stats.read == 50


@pytest.mark.parametrize("workers", [1, 2])
def test_store_build_names_the_first_bad_row_of_the_file(tmp_path, write, load, small_chunks, workers):
    rows = lines(texts(100))
    rows[40] = rows[41] = rows[90] = b"{\n"
    with pytest.raises(BadRowError) as error:
        load(write(b"".join(rows)), num_workers=workers)
    assert "rows.jsonl:41" in error.value.setting
    assert keys_in(tmp_path / "cache") == temporary_in(tmp_path / "cache") == []


@pytest.mark.parametrize("workers", [1, 2])
def test_store_build_names_a_bad_row_before_a_later_read_error(write, load, monkeypatch, workers):
    path = write([*texts(9), {"text": 1}, *texts(20)])
    items = Source.items

    def failing(self, *args):
        for number, item in enumerate(items(self, *args)):
            if number == 20:
                raise OSError(errno.EIO, "Input/output error")
            yield item

    monkeypatch.setattr(Source, "items", failing)
    with pytest.raises(BadRowError, match="rows.jsonl:10"):
        load(path, num_workers=workers)
    with pytest.raises(UserError, match="the file cannot be read: Input/output error"):
        load(path, SKIP, num_workers=workers)


def test_store_build_that_is_stopped_ends_its_workers(tmp_path, write, load, monkeypatch, small_chunks):
    started, start = [], BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda process: (started.append(process), start(process)))

    def stop(done, total, rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(write(texts(100)), progress=stop, num_workers=2)
    assert len(started) == 2 and not any(process.is_alive() for process in started)
    assert keys_in(tmp_path / "cache") == temporary_in(tmp_path / "cache") == []


def test_store_build_fails_without_a_hang_when_a_worker_dies(tmp_path, write, load, monkeypatch, small_chunks):
    start = BaseProcess.start

    def killed(process):
        start(process)
        process.kill()

    monkeypatch.setattr(BaseProcess, "start", killed)
    with pytest.raises(UserError, match=r"tokenizing process [01] of 2 \(pid \d+\) was killed by SIGKILL"):
        load(write(texts(100)), num_workers=2)
    assert keys_in(tmp_path / "cache") == []


@pytest.mark.slow
def test_store_workers_ignore_the_signals_of_their_group(tmp_path, write):
    child = start_building(
        write(texts(200)),
        tmp_path / "cache",
        before="signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        num_workers=2,
        progress="lambda *_: (os.killpg(0, signal.SIGINT), os.killpg(0, signal.SIGTERM))",
    )
    out, error = child.communicate()
    assert child.returncode == 0 and out, error


@pytest.mark.slow
def test_store_workers_do_not_import_torch():
    code = "import sys; import data.store.workers; print('torch' in sys.modules, 'runner' in sys.modules)"
    assert subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout.split() == ["False", "False"]


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_store_build_that_is_killed_leaves_no_store_and_no_worker(tmp_path, write, load):
    path, cache = write(texts(600)), tmp_path / "cache"
    child = start_building(
        path,
        cache,
        num_workers=2,
        progress="lambda *args: (print('on', flush=True), time.sleep(60)) if args[2] > 200 else None",
    )
    assert child.stdout.readline() == "on\n", child.stderr.read()
    workers = children_of(child.pid)
    assert len(workers) == 2
    child.kill()
    child.communicate()
    assert keys_in(cache) == [] and len(temporary_in(cache)) == 1
    store = load(path)  # its death has freed the lock
    assert store.stats.read == 600 and keys_in(cache) == [store.key] and not temporary_in(cache)
    deadline = time.monotonic() + 300
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def killed_at(call_number, work):
    """Fork a child that kills itself instead of its `call_number`th call that changes the disk; return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = itertools.count()

    def counted(call):
        return lambda *args: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call_number else call(*args)

    for name in ("open", "write", "fsync", "rename", "mkdir"):
        setattr(fs, name, counted(getattr(fs, name)))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the library do not survive a fork
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.slow
def test_store_build_killed_at_any_call_leaves_all_or_nothing(tmp_path, write, load):
    path = write(texts(20))
    expected = content_of(load(path))
    for number in range(100):
        cache = tmp_path / str(number)
        status = killed_at(number, lambda cache=cache: load(path, cache=cache))
        for key in keys_in(cache):
            assert content_of(TokenStore.open(cache / key)) == expected
        if status != signal.SIGKILL:
            break
        assert content_of(load(path, cache=cache)) == expected and not temporary_in(cache)
    assert number > 20 and status == 0, "all calls were tried"


@pytest.mark.slow
def test_store_is_built_once_by_concurrent_processes(tmp_path, write):
    path, cache, log = write(texts(100)), tmp_path / "cache", tmp_path / "log"
    before = f"""
encode = cache_module.encode_in_parallel
cache_module.encode_in_parallel = lambda *args: (open({str(log)!r}, "a").write("x"), time.sleep(0.3), encode(*args))[-1]
"""
    outputs = [child.communicate() for child in [start_building(path, cache, before) for _ in range(3)]]
    assert len({out for out, _ in outputs}) == 1 and outputs[0][0], outputs
    assert log.read_text() == "x" and len(keys_in(cache)) == 1


@pytest.mark.slow
def test_store_that_another_process_builds_is_waited_for_by_name(tmp_path, write, load, monkeypatch, capfd):
    monkeypatch.setattr(cache_module, "NOTE_WAIT_AFTER", 0.05)
    path, cache = write(texts(100)), tmp_path / "cache"
    child = start_building(
        path, cache, progress="lambda *args: (print('on', flush=True), time.sleep(60)) if args[2] > 30 else None"
    )
    assert child.stdout.readline() == "on\n"
    note = cache_module.print_note
    monkeypatch.setattr(cache_module, "print_note", lambda text: (note(text), child.kill()))
    assert load(path).stats.read == 100  # the lock of the dead process is free
    child.communicate()
    assert f"waiting for process {child.pid}, which stores tokens in {cache}" in capfd.readouterr().err


def test_store_that_is_incomplete_is_built_again(write, load):
    path = write(texts(50))
    store = load(path)
    expected = content_of(store)
    for name in expected:
        (store.folder / name).write_bytes(expected[name][:-1])
        assert content_of(load(path)) == expected
    shutil.rmtree(store.folder)
    store.folder.touch()
    assert content_of(load(path)) == expected


def test_store_key_depends_on_file_settings_and_tokenizer(tmp_path, write, load):
    path = write(texts(20))
    other = shutil.copytree(SHIPPED, tmp_path / "tokenizer")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    keys = [
        load(path).key,
        load(path, dataclasses.replace(TEXT, max_length=17)).key,
        load(write(texts(20, start=1), "other.jsonl")).key,
        load_or_build(Source.open(path), TEXT, Tokenizer.load(other), tmp_path / "cache").key,
    ]
    assert len(set(keys)) == 4


def imports_of(file):
    """Return the files of data/ that a file imports, at its top or later."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    modules = {
        node.module for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("data.")
    }
    return {ROOT / f"{module.replace('.', '/')}.py" for module in modules}


def test_store_key_covers_all_code_that_decides_token_ids():
    reached = {ROOT / "data/tokenize/encoder.py"}
    while more := set().union(*map(imports_of, reached)) - reached:
        reached |= more
    assert reached <= set(cache_module.fingerprinted_files("text"))


@pytest.fixture
def fresh_fingerprint():
    cache_module.encoding_code_fingerprint.cache_clear()
    yield cache_module.encoding_code_fingerprint.cache_clear
    cache_module.encoding_code_fingerprint.cache_clear()


@pytest.mark.parametrize(
    "name", ["types", "schemas/chat", "schemas/text", "sources/files", "tokenize/chat_template", "tokenize/encoder"]
)
def test_store_of_changed_code_has_another_key_and_the_same_digest(write, load, monkeypatch, fresh_fingerprint, name):
    path = write(texts(3))
    before = load(path)
    fresh_fingerprint()
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + (b"# a comment" if self == ROOT / "data" / f"{name}.py" else b"")
    )
    after = load(path)
    assert after.key != before.key and after.digest == before.digest


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_store_of_another_library_version_has_another_key(write, load, monkeypatch, fresh_fingerprint, name):
    path = write(texts(3))
    before = load(path).key
    fresh_fingerprint()
    monkeypatch.setattr(cache_module, "version", lambda library: "0.0.1" if library == name else version(library))
    assert load(path).key != before


def test_store_digest_does_not_depend_on_settings_without_effect(write, load):
    path = write(texts(20))
    assert load(path).digest == load(path, SKIP).digest and load(path).key != load(path, SKIP).key


def test_stores_of_many_files_load_the_tokenizer_once(tmp_path, write, load, monkeypatch):
    encoding = dataclasses.replace(TEXT, tokenizer=shutil.copytree(SHIPPED, tmp_path / "tokenizer"))
    loaded, load_tokenizer = [], Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda folder: loaded.append(folder) or load_tokenizer(folder))
    for number in range(5):
        load(write(texts(3, start=number), f"{number}.jsonl"), encoding)
    assert loaded == [encoding.tokenizer]


def test_store_uses_a_tokenizer_that_changed_in_its_folder(tmp_path, write):
    folder = shutil.copytree(SHIPPED, tmp_path / "tokenizer")
    encoding, source = dataclasses.replace(TEXT, tokenizer=folder), Source.open(write([{"text": "one"}]))
    ids = []
    for token in ("<|im_start|>", "<think>"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": token}))
        ids.append(int(load_or_build(source, encoding, Tokenizer.load(folder), tmp_path / "cache").read(0)[0][0][0][0]))
    assert ids[0] != ids[1]


def test_store_workers_are_more_for_compressed_files(write, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    raw = b'{"text": "one"}\n'
    plain, compressed = Source.open(write(raw * 2)), Source.open(write(gzip.compress(raw), "rows.jsonl.GZ"))
    table = dataclasses.replace(plain, file_format="parquet")
    monkeypatch.setattr(Source, "size", 3 << 20)
    assert [cache_module.default_workers(source) for source in (plain, compressed, table)] == [1, 6, 6]


def test_store_is_shared_by_equal_files_with_their_own_names(write, load, monkeypatch):
    raw = b'{"text": "one"}\n{\n'
    first, second = write(raw, "first.jsonl"), write(raw, "second.jsonl")
    assert "first.jsonl:2" in list(load(first, SKIP).stats.first_seen.values())[0]
    monkeypatch.setattr(cache_module, "encode_in_parallel", None)
    assert list(load(second, SKIP).stats.first_seen.values())[0].startswith(f"{second}:2")


def test_store_notices_new_bytes_of_the_same_size_and_time(write, load):
    path = write([{"text": "aaaa"}])
    for age in (0, 100):  # seconds since the last change, by its time stamp
        os.utime(path, (time.time() - age,) * 2)
        stat, key = os.stat(path), load(path).key
        path.write_bytes(path.read_bytes().replace(b"a", b"b") if age == 0 else path.read_bytes().replace(b"b", b"c"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert os.stat(path).st_size == stat.st_size and load(path).key != key


def test_file_is_hashed_once_and_again_if_its_record_is_damaged(tmp_path, write, monkeypatch):
    path = write(texts(3))
    monkeypatch.setattr(cache_module, "MTIME_GRANULARITY", -(10**18))  # as if it had been written long ago
    content = file_sha256_cached(path, tmp_path)
    monkeypatch.setattr(cache_module.hashlib, "file_digest", None)
    assert file_sha256_cached(path, tmp_path) == content
    [record] = (tmp_path / "contents").iterdir()
    for damaged in (b"", b"[]", b"{}", b'{"signature": 1}'):
        record.write_bytes(damaged)
        with pytest.raises(TypeError, match="NoneType"):
            file_sha256_cached(path, tmp_path)  # calls file_digest


def test_store_of_a_file_that_grows_meanwhile_is_refused(tmp_path, write, load, small_chunks):
    path = write(texts(50))

    def grow(done, total, rows):
        with open(path, "ab") as file:
            file.write(b'{"text": "more"}\n')

    with pytest.raises(UserError, match="changed while it was read"):
        load(path, progress=grow)
    assert keys_in(tmp_path / "cache") == []


def test_progress_rises_to_the_size_of_the_file(write, load, small_chunks):
    path, calls = write(texts(100)), []
    load(path, progress=lambda *call: calls.append(call))
    size = path.stat().st_size
    assert calls == sorted(calls) and calls[-1] == (size, size, 100) and len(calls) > 5
    assert all(total == size and 0 <= done <= size for done, total, _ in calls)


def test_progress_is_reported_once_per_interval(write, load, monkeypatch, small_chunks):
    monkeypatch.setattr(cache_module, "REPORT_EVERY", 3600)
    calls = []
    load(write(texts(100)), progress=lambda *call: calls.append(call))
    assert len(calls) == 1


def test_cache_on_a_full_disk_is_a_user_error_and_leaves_nothing(tmp_path, write, load, monkeypatch):
    path = write(texts(50))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fs, "write", full, raising=False)
    with pytest.raises(UserError, match="tokens cannot be stored: No space left") as error:
        load(path)
    assert error.value.setting == f"data.cache={tmp_path / 'cache'}" and "data.cache=" in error.value.fix
    assert keys_in(tmp_path / "cache") == temporary_in(tmp_path / "cache") == []


def test_cache_that_is_a_file_is_a_user_error(write, load):
    with pytest.raises(UserError, match="cannot be stored"):
        load(write(texts(3)), cache=write(b"", "file"))


def test_cache_that_is_read_only_is_a_user_error(write, load, monkeypatch):
    path, open_file = write(texts(3)), os.open

    def read_only(name, *args, **options):
        if str(name).endswith(".lock"):
            raise OSError(errno.EROFS, "Read-only file system")
        return open_file(name, *args, **options)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UserError, match="cannot be stored: Read-only file system") as refused:
        load(path)
    assert refused.value.fix == "use another folder: data.cache=FOLDER"


def test_cache_removes_what_a_killed_build_of_another_store_left(tmp_path, write, load):
    cache = tmp_path / "cache"
    store = load(write(texts(3)))
    left = cache / f".tmp-{'0' * 64}-1-abcd"
    left.mkdir()
    (left / "tokens.bin").touch()
    assert load(write(texts(4), "other.jsonl")).key != store.key and not left.exists()


def test_cache_lock_is_free_after_the_build(tmp_path, write, load):
    assert not is_file_locked(tmp_path / "cache" / f"{load(write(texts(3))).key}.lock")


def test_store_of_other_columns_is_another_one(tmp_path, write, tokenizer):
    path = write([{"text": "one", "body": "another text"}])
    sources = [Source.open(path, ReadOptions(columns=columns)) for columns in ((), (("text", "body"),))]
    stores = [load_or_build(source, TEXT, tokenizer, tmp_path / "cache") for source in sources]
    assert [tokenizer.decode(store.read(0)[0][0][0].tolist()) for store in stores] == ["one", "another text"]


def test_file_that_changes_within_a_tick_of_its_clock_is_hashed_again(tmp_path, write, monkeypatch):
    """The times of a file system may have a granularity of two seconds."""
    path, now = write(b"first"), time.time_ns()
    monkeypatch.setattr(cache_module, "_file_signature", lambda path: [5, now, now, 1])
    first = file_sha256_cached(path, tmp_path)
    path.write_bytes(b"other")
    assert file_sha256_cached(path, tmp_path) != first


def test_cache_of_the_workspace_is_not_group_writable_for_any_umask(load, tmp_path, monkeypatch):
    """Compiled programs are in the same folder: they are not used where a group may write."""
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines(texts(2))))
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    before = os.umask(0o002)
    try:
        load(tmp_path / "a.jsonl", cache=tmp_path / ".cache")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that what is set now is removed after the test
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        assert set_inductor_cache() == tmp_path / ".cache" / "compiled"
        load(tmp_path / "a.jsonl", cache=tmp_path / "shared")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (".cache", "shared")] == [0o755, 0o775]
