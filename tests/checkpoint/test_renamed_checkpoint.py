"""A checkpoint under the name of another step: its folder, its manifest and its state must name the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import Interrupted, UserError
from common.filesystem import dump_sealed_json
from runner.checkpoint.atomic_dir import MANIFEST_FILE, newest_valid, verify_dir, write_atomic_dir
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


def test_resume_refuses_a_renamed_checkpoint_whose_manifest_has_no_name(stopped: Path, make_run) -> None:
    """As saved by earlier versions."""
    newest = stopped / "step-00000003"
    body = json.loads((newest / MANIFEST_FILE).read_text())
    (newest / MANIFEST_FILE).write_bytes(
        dump_sealed_json({name: value for name, value in body.items() if name not in ("name", "sha256")})
    )
    assert verify_dir(newest) is None
    newest.rename(stopped / "step-00000005")
    with pytest.raises(UserError, match="checkpoint of step 3, renamed") as caught:
        train(make_run("pretrain", "train.max_steps=6"))
    assert caught.value.fix == "rename it to step-00000003"
