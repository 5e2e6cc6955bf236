"""Shared by the checkpoint tests: a directory in memory, and no waits between retries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from common import filesystem


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of the disk that fails is repeated at once, also in forked children."""
    monkeypatch.setattr(filesystem, "RETRY_SECONDS", (0, 0))


@pytest.fixture
def memory_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory if the system has one: thousands of fsync calls take minutes on a disk."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as folder:
        yield Path(folder)
