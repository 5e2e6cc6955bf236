"""Files of a folder of unknown origin: links, pipes and devices are neither opened nor followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from common.guarded_files import check_own_files, open_append, read_from, read_source_file

ODD: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to(path.parent / "victim"),
    "dangling link": lambda path: path.symlink_to(path.parent / "new"),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_are_not_opened_to_append_or_to_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    ODD[kind](tmp_path / "log")
    for use in (open_append, lambda path: read_from(path, 0)):
        with pytest.raises(OSError):
            use(tmp_path / "log")
    for check in (lambda: read_source_file(tmp_path / "log", 10), lambda: check_own_files(tmp_path, ["log"])):
        with pytest.raises(UserError):
            check()
    assert (tmp_path / "victim").read_text() == "kept" and not (tmp_path / "new").exists()


def test_append_creates_a_file_and_keeps_what_it_holds(tmp_path: Path) -> None:
    for _ in range(2):
        with open_append(tmp_path / "log") as log:
            log.write(b"0123456789")
    assert read_from(tmp_path / "log", 0) == b"0123456789" * 2
    assert read_from(tmp_path / "log", 12) == b"23456789" and read_from(tmp_path / "log", 2, limit=3) == b"789"


def test_check_looks_below_the_names_but_not_below_shallow_ones_or_at_others(tmp_path: Path) -> None:
    (tmp_path / "named" / "inner").mkdir(parents=True)
    (tmp_path / "other").symlink_to(tmp_path)
    (tmp_path / "named" / "inner" / "link").symlink_to("missing")
    check_own_files(tmp_path, ["absent"], shallow=["named"])
    with pytest.raises(UserError) as caught:
        check_own_files(tmp_path, ["named"])
    assert caught.value.setting == str(tmp_path / "named" / "inner" / "link")


def test_source_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("x" * 11)
    with pytest.raises(UserError, match="at most 10"):
        read_source_file(tmp_path / "config.json", 10)


def test_append_refuses_a_file_that_has_another_name(tmp_path: Path) -> None:
    """A hard link, as in a copy of a folder by `cp -al`: both would be changed."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.link(tmp_path / "metrics.jsonl", tmp_path / "backup")
    with pytest.raises(UserError, match="2 names"):
        open_append(tmp_path / "metrics.jsonl")
