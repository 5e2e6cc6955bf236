"""A checkpoint under the name of another step: its folder and its manifest must name the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import Interrupted
from runner.checkpoint.atomic_dir import newest_valid, verify_dir, write_atomic_dir
from runner.engine.loop import train


@pytest.fixture
def stopped(make_run) -> Path:
    """A run with checkpoints of the steps 1, 2 and 3; return its checkpoints/."""
    state = make_run("pretrain", "train.max_steps=6", "train.save_every=1")
    with pytest.raises(Interrupted):
        train(state, lambda: state.progress.step == 3)
    return state.run_dir / "checkpoints"


def test_renamed_folder_is_not_valid_and_named(tmp_path: Path) -> None:
    write_atomic_dir(tmp_path, "step-00000005", {"a": b"1"}, {})
    assert verify_dir(tmp_path / "step-00000005") is None
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000009")
    assert newest_valid(tmp_path) == (
        None,
        [("step-00000009", "MANIFEST.json: it is that of 'step-00000005': the folder was renamed, or the file copied")],
    )


def test_resume_passes_over_a_renamed_checkpoint(stopped: Path, make_run) -> None:
    (stopped / "step-00000001").rename(stopped / "step-00000005")
    state = make_run("pretrain", "train.max_steps=6")
    train(state)
    log = (state.run_dir / "train.log").read_text()
    assert (
        "checkpoint step-00000005 skipped: MANIFEST.json: it is that of 'step-00000001': the folder was renamed, or the file copied"
        in log
        and "at step 3" in log
    )
