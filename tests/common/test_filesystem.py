"""Atomic files: replaced as a whole, or left as they were."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common import filesystem


def test_write_json_replaces_the_file_as_a_whole_or_leaves_it(tmp_path: Path) -> None:
    filesystem.write_json(tmp_path / "run.json", {"error": "no such file: b\udcff 文"})
    assert json.loads((tmp_path / "run.json").read_text()) == {"error": "no such file: b\udcff 文"}
    with pytest.raises(ValueError):
        filesystem.write_json(tmp_path / "run.json", {"loss": float("nan")})
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OSError):
        filesystem.write_json(tmp_path / "a folder", {})
    assert sorted(os.listdir(tmp_path)) == ["a folder", "run.json"]


def test_write_hashed_file_joins_chunks_and_returns_their_checksum(tmp_path: Path) -> None:
    entry = filesystem.write_hashed_file(tmp_path / "chunks", [b"one", memoryview(b"two"), bytearray(b""), b"three"])
    assert (
        entry == filesystem.write_hashed_file(tmp_path / "joined", b"onetwothree")
        and (tmp_path / "chunks").read_bytes() == b"onetwothree"
    )


def test_read_bounded_refuses_links_and_long_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert filesystem.read_bounded(tmp_path / "file", 5) == b"12345"
    for path, limit in ((tmp_path / "file", 4), (tmp_path / "link", 5), (tmp_path, 5)):
        with pytest.raises(OSError):
            filesystem.read_bounded(path, limit)
