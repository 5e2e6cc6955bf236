"""`uninterrupted`: a completed run; `killed`: a copy of it as a kill would have left it."""

from __future__ import annotations

from pathlib import Path

import pytest
from damaged_runs import kill, train_reference


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reference(tmp_path_factory.mktemp("pretrain"), "pretrain", None)


@pytest.fixture
def killed(uninterrupted: Path, tmp_path: Path) -> Path:
    return kill(uninterrupted, tmp_path / "run")
