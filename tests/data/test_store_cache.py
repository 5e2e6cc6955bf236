import ast
import dataclasses
import errno
import fcntl
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
from pathlib import Path

import pytest

from common.errors import UserError
from data.schemas.errors import BadRowError
from data.sources.files import Source
from data.store import cache as cache_module
from data.store import workers as workers_module
from data.store.cache import file_sha256_cached, load_or_build
from data.store.layout import STORE_FILES, STORE_MANIFEST
from data.store.reader import TokenStore
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "data" / "samples" / "tokenizer"
TEXT = EncodingConfig("text", "text", SHIPPED, max_length=16, too_long="split", train_on="assistant", on_bad_row="error")
SKIP = EncodingConfig("text", "text", SHIPPED, max_length=16, too_long="split", train_on="assistant", on_bad_row="skip")


def texts(count, start=0):
    return [{"text": f"row {i}: 天地玄黄 " + "word " * (i % 40)} for i in range(start, start + count)]


def bytes_of(store):
    return {name: (store.folder / name).read_bytes() for name in [*STORE_FILES, STORE_MANIFEST]}


def stores(cache):
    return sorted(path.name for path in cache.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name))


@pytest.fixture
def made(tmp_path, tokenizer):
    """made(path, recipe) prepares in a cache of this test."""
    return lambda path, recipe=TEXT, cache=tmp_path / "cache", **words: load_or_build(Source.open(path), recipe, tokenizer, cache, **words)


def command(path, cache, before="", workers=1, progress="silent"):
    """A process that prepares `path`; `before` is code that it runs first."""
    code = f"""
import os, sys, time, signal
from pathlib import Path
from data import build
from data.build import prepare, silent
from data.formats import Source
from data.rows import Recipe
from data.tokenizer import Tokenizer
build.CHUNK_ROWS, build.REPORT_EVERY = 20, 0
{before}
recipe = Recipe("text", "text", Path({str(SHIPPED)!r}), max_length=16, too_long="split", train_on="assistant", on_bad_row="error")
store = prepare(Source.open(Path({str(path)!r})), recipe, Tokenizer.load(recipe.tokenizer), Path({str(cache)!r}), {progress}, {workers})
print(store.key, len(store))
"""
    words = [sys.executable, "-c", code]
    # a group of its own: a test may send signals to it
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True
    )


def test_a_file_is_tokenised_once(tmp_path, write, made, monkeypatch):
    path = write(texts(50))
    first = made(path)
    monkeypatch.setattr(cache_module, "encode_in_parallel", None)
    again = made(path)
    assert again.key == first.key and again.tally == first.tally and again.tally.read == 50
    assert again.read(7)[0][0][0].tolist() == first.read(7)[0][0][0].tolist()


def test_the_store_holds_what_the_rows_say(write, made, tokenizer):
    store = made(write(texts(30)))
    words = {}
    for i in range(len(store)):
        [(ids, learn)], place = store.read(i)
        assert learn.tolist() == [False] + [True] * (len(ids) - 1)
        words[place] = words.get(place, [tokenizer.bos_id]) + ids[1:].tolist()  # parts overlap by a token
    assert [tokenizer.decode(ids) for ids in words.values()] == [row["text"] for row in texts(30)]
    assert list(words) == list(range(1, 31))


@pytest.mark.parametrize("recipe", [TEXT, SKIP], ids=["error", "skip"])
def test_the_number_of_workers_changes_no_byte(tmp_path, write, made, monkeypatch, recipe):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 16)
    rows = [json.dumps(row).encode() + b"\n" for row in texts(300)]
    if recipe is SKIP:
        rows[5] = rows[150] = b'{"text": 1}\n'
        rows[77] = b"{\n"
    path = write(b"".join(rows))
    alone, by_two = (bytes_of(made(path, recipe, tmp_path / str(workers), workers=workers)) for workers in (1, 2))
    assert alone == by_two


def test_a_small_file_starts_no_process(tmp_path, write, made, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert made(write(texts(50))).tally.read == 50


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_row_is_the_one_that_is_named(tmp_path, write, made, monkeypatch, workers):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 4)
    rows = [json.dumps(row).encode() + b"\n" for row in texts(100)]
    rows[40] = rows[41] = rows[90] = b"{\n"
    with pytest.raises(BadRowError) as refusal:
        made(write(b"".join(rows)), workers=workers)
    assert "rows.jsonl:41" in refusal.value.args[1]
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name != "contents"] == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_comes_before_a_file_that_cannot_be_read_on(write, made, monkeypatch, workers):
    path = write([*texts(9), {"text": 1}, *texts(20)])
    read = Source.items

    def breaks(self, *words):
        for number, item in enumerate(read(self, *words)):
            if number == 20:
                raise UserError("the file ends here", str(self.path), "copy it again")
            yield item

    monkeypatch.setattr(Source, "items", breaks)
    with pytest.raises(BadRowError, match="rows.jsonl:10"):
        made(path, workers=workers)
    with pytest.raises(ValueError, match="the file ends here"):
        made(path, SKIP, workers=workers)


def test_no_worker_stays_behind(tmp_path, write, made, monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 4)
    monkeypatch.setattr(cache_module, "REPORT_EVERY", 0)
    started = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: started.append(start(*words, **more)) or started[-1])

    def stop(done, total, rows):
        raise KeyboardInterrupt

    path = write(texts(400))
    with pytest.raises(KeyboardInterrupt):
        made(path, progress=stop, workers=2)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert stores(tmp_path / "cache") == []
    assert made(path, workers=2).tally.read == 400


def test_a_worker_that_dies_is_an_error_and_no_hang(tmp_path, write, made, monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 4)
    start = subprocess.Popen

    def dies(*words, **more):
        process = start(*words, **more)
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", dies)
    with pytest.raises(ValueError, match="ended before its work was done"):
        made(write(texts(400)), workers=2)
    assert stores(tmp_path / "cache") == []


def test_workers_outlive_the_signals_of_their_group(tmp_path, write):
    child = command(
        write(texts(2000)),
        tmp_path / "cache",
        before="signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        workers=2,
        progress="lambda *told: (os.killpg(0, signal.SIGINT), os.killpg(0, signal.SIGTERM))",
    )
    out, error = child.communicate()
    assert child.returncode == 0 and out, error


def test_workers_load_no_torch(write, tmp_path):
    code = "import sys; import data.store.workers; print('torch' in sys.modules, 'runner' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert told.stdout.split() == ["False", "False"]


def descendants(pid):
    """Processes that `pid` started (Linux)."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_builder_leaves_nothing_that_is_taken_for_a_store(tmp_path, write, made, workers):
    path, cache = write(texts(4000)), tmp_path / "cache"
    child = command(path, cache, workers=workers, progress="lambda *told: (print('on', flush=True), time.sleep(60)) if told[2] > 200 else None")
    assert child.stdout.readline() == "on\n"
    started = descendants(child.pid)
    assert len(started) == (workers if workers > 1 else 0)
    child.kill()
    child.wait()
    assert stores(cache) == [] and len(list(cache.glob(".*.tmp"))) == 1
    store = made(path)  # the lock died with its owner
    assert store.tally.read == 4000 and stores(cache) == [store.key] and not list(cache.glob(".*.tmp"))
    deadline = time.monotonic() + 10
    while any(map(alive, started)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)


def killed_at(call_number, work):
    """The exit status of a forked child that kills itself instead of its `call_number`th call that changes the disk."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = itertools.count()

    def counted(call):
        return lambda *words, **more: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == call_number else call(*words, **more)

    for name in ("write", "fsync", "rename", "mkdir", "replace"):
        setattr(os, name, counted(getattr(os, name)))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not come along
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_builder_killed_at_any_call_leaves_all_or_nothing(tmp_path, write, made):
    path = write(texts(20))
    whole = bytes_of(made(path))
    for number in range(100):
        cache = tmp_path / str(number)
        status = killed_at(number, lambda cache=cache: made(path, cache=cache))
        for name in stores(cache) if cache.exists() else []:
            assert bytes_of(TokenStore.open(cache / name)) == whole
        if status != signal.SIGKILL:
            break
        assert bytes_of(made(path, cache=cache)) == whole
    assert number > 10 and status == 0, "every call was met"


def test_two_at_once_build_once(tmp_path, write):
    path, cache, log = write(texts(3000)), tmp_path / "cache", tmp_path / "built"
    before = f"encoded = build.encoded; build.encoded = lambda *words: (open({str(log)!r}, 'a').write('x'), time.sleep(0.5), encoded(*words))[-1]"
    children = [command(path, cache, before) for _ in range(3)]
    told = [child.communicate() for child in children]
    assert len({out for out, _ in told}) == 1 and told[0][0], told
    assert log.read_text() == "x" and len(stores(cache)) == 1


def test_a_torn_store_is_built_again(write, made, monkeypatch):
    path = write(texts(50))
    store = made(path)
    whole = bytes_of(store)
    for name in whole:
        (store.folder / name).write_bytes(whole[name][:-1])
        assert bytes_of(made(path)) == whole


def test_what_decides_the_ids_decides_the_key(tmp_path, write, made, tokenizer):
    path = write(texts(20))
    other = tmp_path / "tokenizer"
    shutil.copytree(SHIPPED, other)
    (other / "chat_template.jinja").write_text("{{ messages }}")
    longer = EncodingConfig("text", "text", SHIPPED, max_length=17, too_long="split", train_on="assistant", on_bad_row="error")
    keys = [
        made(path).key,
        made(path, longer).key,
        made(write(texts(20, start=1), "other.jsonl")).key,
        load_or_build(Source.open(path), TEXT, Tokenizer.load(other), tmp_path / "cache").key,
    ]
    assert len(set(keys)) == 4


def imported(name):
    """Modules of data/ that a module loads, at its top or later."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / "data" / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("data."):
            found.add(node.module.removeprefix("data."))
    return found


def test_no_file_that_decides_the_ids_is_missing_from_the_key():
    reached = {"rows"}
    while more := set().union(*map(imported, reached)) - reached:
        reached |= more
    assert reached - {"hub"} == set(cache_module.FINGERPRINTED_CODE)  # hub names files, whose bytes are in the key


@pytest.fixture
def forgotten():
    cache_module.code_fingerprint.cache_clear()
    yield
    cache_module.code_fingerprint.cache_clear()


@pytest.mark.parametrize("name", cache_module.FINGERPRINTED_CODE)
def test_other_code_is_another_key_and_the_same_digest(write, made, monkeypatch, forgotten, name):
    path = write(texts(3))
    before = made(path)
    cache_module.code_fingerprint.cache_clear()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + (b"# a comment" if self == ROOT / "data" / f"{name}.py" else b""))
    after = made(path)
    assert after.key != before.key and after.digest == before.digest


@pytest.mark.parametrize("name", ["tokenizers", "jinja2"])
def test_another_version_of_a_library_is_another_key(write, made, monkeypatch, forgotten, name):
    path = write(texts(3))
    before = made(path).key
    cache_module.code_fingerprint.cache_clear()
    monkeypatch.setattr(cache_module, "version", lambda library: "0.0.1" if library == name else version(library))
    assert made(path).key != before


def test_skipping_bad_rows_where_there_are_none_changes_no_digest(write, made):
    path = write(texts(20))
    assert made(path).digest == made(path, SKIP).digest and made(path).key != made(path, SKIP).key


def test_many_files_load_one_tokenizer(write, made, monkeypatch):
    loaded = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda folder: loaded.append(folder) or load(folder))
    workers_module._load_encoder.cache_clear()
    for number in range(5):
        made(write(texts(3, start=number), f"{number}.jsonl"))
    assert loaded == [SHIPPED]


def test_a_tokenizer_that_changed_in_its_folder_is_loaded_again(tmp_path, write):
    folder = tmp_path / "tokenizer"
    shutil.copytree(SHIPPED, folder)
    recipe, source = dataclasses.replace(TEXT, tokenizer=folder), Source.open(write([{"text": "one"}]))
    ids = []
    for token in ("<|im_start|>", "<think>"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": token}))
        ids.append(int(load_or_build(source, recipe, Tokenizer.load(folder), tmp_path / "cache").read(0)[0][0][0][0]))
    assert ids[0] != ids[1]


def test_a_packed_file_of_a_few_mb_is_worth_workers(write, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    raw = b'{"text": "one"}\n'
    plain, packed = Source.open(write(raw * 2)), Source.open(write(gzip.compress(raw), "rows.jsonl.GZ"))
    table = dataclasses.replace(plain, kind="parquet")
    monkeypatch.setattr(Source, "size", 3 << 20)
    assert [cache_module._count_workers(source) for source in (plain, packed, table)] == [1, 6, 6]


def test_touching_a_file_tokenises_nothing(write, made, monkeypatch):
    path = write(texts(20))
    key = made(path).key
    os.utime(path, (1, 1))
    monkeypatch.setattr(cache_module, "encode_in_parallel", None)
    assert made(path).key == key


def test_the_same_bytes_elsewhere_share_a_store_but_not_its_words(tmp_path, write, made, monkeypatch):
    raw = b'{"text": "one"}\n{\n'
    first, second = write(raw, "first.jsonl"), write(raw, "second.jsonl")
    assert "first.jsonl:2" in list(made(first, SKIP).tally.first.values())[0]
    monkeypatch.setattr(cache_module, "encode_in_parallel", None)
    assert list(made(second, SKIP).tally.first.values())[0].startswith(f"{second}:2")


def test_new_bytes_of_the_same_size_and_time_are_noticed(tmp_path, write, made):
    path = write([{"text": "aaaa"}])
    for age in (0, 100):  # just written, and long ago as far as the file says
        os.utime(path, (time.time() - age,) * 2)
        kept, key = os.stat(path), made(path).key
        path.write_bytes(path.read_bytes().replace(b"a", b"b") if age == 0 else path.read_bytes().replace(b"b", b"c"))
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        assert os.stat(path).st_size == kept.st_size and made(path).key != key


def test_a_file_is_hashed_once(tmp_path, write, monkeypatch):
    path, cache = write(texts(3)), tmp_path
    monkeypatch.setattr(cache_module, "MTIME_GRANULARITY", -(10**18))  # as if it had been written long ago
    content = file_sha256_cached(path, cache)
    monkeypatch.setattr(cache_module.hashlib, "file_digest", None)
    assert file_sha256_cached(path, cache) == content
    [known] = (cache / "contents").iterdir()
    for damaged in (b"", b"[]", b"{}", b'{"mark": 1}'):
        known.write_bytes(damaged)
        with pytest.raises(TypeError, match="NoneType"):
            file_sha256_cached(path, cache)  # would hash again


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, write, made, monkeypatch):
    path = write(texts(50))

    def grow(done, total, rows):
        with open(path, "ab") as file:
            file.write(b'{"text": "more"}\n')

    monkeypatch.setattr(cache_module, "REPORT_EVERY", 0)
    with pytest.raises(ValueError, match="changed while it was read"):
        made(path, progress=grow)
    assert stores(tmp_path / "cache") == []


def test_progress_rises_to_the_whole_file(write, made, monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 10)
    monkeypatch.setattr(cache_module, "REPORT_EVERY", 0)
    path, told = write(texts(100)), []
    made(path, progress=lambda *step: told.append(step))
    size = path.stat().st_size
    assert told == sorted(told) and told[-1] == (size, size, 100) and len(told) > 5
    assert all(total == size and 0 <= done <= size for done, total, _ in told)


def test_progress_is_told_ten_times_a_second_at_most(write, made, monkeypatch):
    monkeypatch.setattr(cache_module, "CHUNK_ROWS", 1)
    told = []
    began = time.monotonic()
    made(write(texts(300)), progress=lambda *step: told.append(step))
    assert len(told) <= 10 * (time.monotonic() - began) + 1


def test_a_full_disk_is_explained_and_leaves_nothing(tmp_path, write, made, monkeypatch):
    path = write(texts(50))

    def full(*words):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ValueError) as refusal:
        made(path)
    what, where, fix = refusal.value.args
    assert "No space left" in what and str(tmp_path / "cache") in where and "data.cache=" in fix
    monkeypatch.undo()
    assert stores(tmp_path / "cache") == [] and not list((tmp_path / "cache").glob(".*.tmp"))


def test_a_cache_that_is_a_file_is_explained(tmp_path, write, made):
    with pytest.raises(ValueError, match="cannot be stored"):
        made(write(texts(3)), cache=write(b"", "file"))


def test_a_cache_that_is_read_only_is_explained(tmp_path, write, made, monkeypatch):
    path = write(texts(3))
    opened = open

    def refused(name, *words, **more):
        if str(name).endswith(".lock"):
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(name, *words, **more)

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(ValueError, match="cannot be stored: Read-only file system"):
        made(path)


def test_a_file_where_the_store_should_be_is_replaced(write, made):
    path = write(texts(3))
    store = made(path)
    shutil.rmtree(store.folder)
    store.folder.touch()
    assert made(path).read(0)[1] == 1


def test_what_a_killed_builder_of_another_store_left_is_removed(tmp_path, write, made):
    cache = tmp_path / "cache"
    store = made(write(texts(3)))
    left = cache / f".{'0' * 64}.tmp"
    left.mkdir()
    (left / "tokens.bin").touch()
    assert made(write(texts(4), "other.jsonl")).key != store.key and not left.exists()


def test_the_lock_is_free_afterwards(tmp_path, write, made):
    store = made(write(texts(3)))
    with open(tmp_path / "cache" / f"{store.key}.lock", "ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
