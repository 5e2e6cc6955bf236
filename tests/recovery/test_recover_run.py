"""Whole checkpoints can always be continued: every kind of damage to the other files is repaired and reported, or
refused with nothing changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from command_fixtures import Call
from damaged_runs import (
    CHECKPOINTS,
    DAMAGES,
    FOREIGN,
    LOGS,
    RUN_JSON,
    SAVED,
    SETTINGS,
    STEPS,
    TOKENIZER,
    Damage,
    kill,
    train_reference,
)

from common.errors import UserError
from runner.checkpoint.atomic_dir import write_atomic_dir
from runner.checkpoint.format import read_newest_state
from runner.checkpoint.manager import newest_checkpoint
from runner.checkpoint.saving import RetentionPolicy, prune_checkpoints
from runner.config.snapshot import load_overrides
from runner.engine.verify_resume import EXCLUDED_METRICS, diff_run_dirs
from runner.launch.doctor import Verdict, examine_run
from runner.launch.recovery import CheckpointState, Severity, inspect_run, recover_run
from runner.run_dir.contents import holds_run
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import load_saved_config
from runner.tracking.jsonl import JsonlLog, SavedLogs


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# logs are repaired when they are opened
REPAIRED = {name: damage for name, damage in DAMAGES.items() if name not in LOGS}


@pytest.mark.parametrize("damage", REPAIRED.values(), ids=REPAIRED)
def test_damage_is_repaired_and_reported_or_refused_with_nothing_changed(killed: Path, damage: Damage) -> None:
    damage.apply(killed)
    before = contents(killed)
    if (
        damage.is_refused
        and "no checkpoint of" not in damage.message
        and damage is not CHECKPOINTS["all checkpoints damaged"]
    ):
        with pytest.raises(UserError) as caught:
            RunMetadata.open(killed, resume=True, recover=recover_run)
        assert damage.message in caught.value.message and caught.value.fix and contents(killed) == before
        return
    messages = recover_run(killed)
    expected = (
        damage.message if damage is not CHECKPOINTS["newest checkpoint damaged"] and not damage.is_refused else ""
    )
    assert any(expected in message for message in messages) if expected else messages == []
    assert [message for message in recover_run(killed) if "names it as the newest" not in message] == [], (
        "a second resume finds nothing to repair"
    )
    after = contents(killed)
    kept = {digest for name, digest in after.items() if name.startswith("damaged/")}
    for name, digest in before.items():
        assert after[name] == digest or digest in kept, f"{name} was changed without a copy"


def test_restored_run_json_is_that_of_the_run(killed: Path) -> None:
    before = json.loads((killed / "run.json").read_text())
    (killed / "run.json").unlink()
    recover_run(killed)
    after = json.loads((killed / "run.json").read_text())
    same = (
        "id",
        "stage",
        "init_from",
        "tokenizer_source",
        "exact",
        "fingerprints",
        "attempt",
        "step",
        "checkpoint",
        "data",
        "evaluation",
    )
    assert {name: after[name] for name in same} == {name: before[name] for name in same} and after[
        "status"
    ] == "interrupted"


def test_restored_run_json_counts_archives_and_keeps_any_byte(killed: Path) -> None:
    """A byte of a path that is not UTF-8, and an attempt that was killed before its first checkpoint."""
    newest = newest_checkpoint(killed)
    files = {path.name: [path.read_bytes()] for path in newest.iterdir() if path.name != "MANIFEST.json"}
    state = json.loads(files["state.json"][0])
    state["run"]["fields"]["note"] = "caf\udce9"
    shutil.rmtree(newest)
    write_atomic_dir(newest.parent, newest.name, files | {"state.json": [json.dumps(state).encode()]}, {})
    (killed / "metrics.attempt7.jsonl").touch()
    (killed / "run.json").unlink()
    recover_run(killed)
    restored = json.loads((killed / "run.json").read_text())
    assert (restored["attempt"], restored["note"]) == (7, "caf\udce9")


def test_restored_settings_are_byte_for_byte_those_of_the_run(killed: Path) -> None:
    before = contents(killed)
    shutil.rmtree(killed / ".hydra" / "conf")
    for name in ("config.yaml", "overrides.yaml"):
        (killed / ".hydra" / name).unlink()
    recover_run(killed)
    assert contents(killed) == before


def test_config_with_another_option_chosen_since_the_checkpoint_is_kept(killed: Path) -> None:
    config = killed / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("name: cosine", "name: constant").replace("  min_lr_ratio: 0.1\n", ""))
    before = config.read_text()
    assert recover_run(killed) == [] and config.read_text() == before


def test_save_and_retention_ignore_foreign_names(killed: Path) -> None:
    DAMAGES["files in checkpoints"].apply(killed)
    checkpoints = killed / "checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000004 (copy)")
    prune_checkpoints(checkpoints, RetentionPolicy(keep_newest=2, keep_every=1))
    assert newest_checkpoint(killed).name == "step-00000004" and (checkpoints / "step-00000004.bak").is_file()


def test_findings_name_each_file_that_a_resume_reads(killed: Path) -> None:
    findings = {problem.file: problem.severity for problem in inspect_run(CheckpointState(killed))}
    assert set(findings.values()) == {Severity.SOUND}
    assert {
        "run.json",
        ".hydra/config.yaml",
        ".hydra/overrides.yaml",
        "tokenizer/tokenizer.json",
        "metrics.jsonl",
        f"checkpoints/step-{SAVED:08d}",
    } <= set(findings)


@pytest.mark.parametrize("damage", LOGS.values(), ids=LOGS)
def test_inspection_finds_a_damaged_log_and_writes_nothing(killed: Path, damage: Damage) -> None:
    damage.apply(killed)
    before = contents(killed)
    assert [
        problem.file in damage.message
        for problem in inspect_run(CheckpointState(killed))
        if problem.severity is Severity.DAMAGED
    ] in ([True], [False])
    assert contents(killed) == before


def check_continues(call: Call, uninterrupted: Path, run: Path, damage: Damage) -> None:
    """Resume the damaged run; it ends with the bits of the uninterrupted one, and has printed and recorded what was
    wrong.
    """
    prediction = examine_run(run).prediction if holds_run(run) else None
    result = call(f"resume={run}")
    assert prediction is None or (prediction.verdict is Verdict.REFUSES) == (result.returncode != 0), prediction
    if damage.is_refused:
        assert result.returncode == 2 and damage.message in result.stderr and "Traceback" not in result.stderr, result
        return
    assert result.returncode == 0 and damage.message in result.stdout + result.stderr, result
    assert prediction and f"at step {prediction.step} (attempt " in result.stdout, (prediction, result)
    fields = json.loads((run / "run.json").read_text())
    assert fields["status"] == "completed" and fields["step"] == STEPS and fields["exact"] is True
    assert not damage.message or any(damage.message.split("; ")[0] in message for message in fields["recovered"]), (
        fields["recovered"]
    )
    differences = diff_run_dirs(uninterrupted, run)
    assert [
        difference
        for difference in differences
        if not (damage.loses_records and difference.startswith("metrics.jsonl"))
    ] == []
    assert records_after(run) == records_after(uninterrupted)


def records_after(run: Path) -> list[dict]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name not in EXCLUDED_METRICS}
        for record in records
        if record["step"] > SAVED
    ]


FAST = ("run.json missing", "checkpoints not mounted")
SLOW = (
    "run.json of another run", "run.json newer than the checkpoint", ".hydra and run.json missing", "config.yaml cut off", "copy of conf missing", "tokenizer missing",
    "checkpoints and run.json gone", "all checkpoints damaged", "newest checkpoint damaged, run.json missing", "files in a checkpoint", "files in checkpoints",
    "metrics of zeros", "samples missing", "tokenizer a file",
)  # fmt: skip
# about a second each; the repairs of the others are tested above
RESUMED = DAMAGES if os.environ.get("ALL_DAMAGES") else (*FAST, *SLOW)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in RESUMED]
)
def test_damaged_run_continues_to_the_same_bits_or_is_refused(
    call: Call, uninterrupted: Path, killed: Path, name: str
) -> None:
    DAMAGES[name].apply(killed)
    check_continues(call, uninterrupted, killed, DAMAGES[name])


# what the source of the weights is read from or written again to
OF_EVERY_STAGE = ("run.json missing", "run.json of another run", ".hydra missing", "newest checkpoint damaged")
OF_LORA = (*OF_EVERY_STAGE, "tokenizer missing", "metrics missing", "files in a checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "damages"), [("lora", OF_LORA), ("dpo", OF_EVERY_STAGE)], ids=["lora", "dpo"])
def test_damaged_run_of_another_stage_continues_to_the_same_bits(
    call: Call, uninterrupted: Path, tmp_path: Path, stage: str, damages: tuple[str, ...]
) -> None:
    """Adapters and a reference model need the weights that the run started from, which no checkpoint holds."""
    reference = train_reference(tmp_path, stage, uninterrupted)
    for number, name in enumerate(damages):
        run = kill(reference, tmp_path / f"run{number}")
        DAMAGES[name].apply(run)
        check_continues(call, reference, run, DAMAGES[name])


def test_damages_cover_every_kind() -> None:
    assert [len(kind) for kind in (RUN_JSON, SETTINGS, TOKENIZER, CHECKPOINTS, FOREIGN, LOGS)] >= [15, 15, 4, 9, 7, 6]


def test_overrides_after_the_checkpoint_are_named_when_the_config_is_lost(killed: Path) -> None:
    overrides = killed / ".hydra" / "overrides.yaml"
    overrides.write_text(overrides.read_text() + "- optimizer.lr=0.5\n")
    assert recover_run(killed) == []
    (killed / ".hydra" / "config.yaml").unlink()
    assert any("type optimizer.lr=0.5 again" in message for message in recover_run(killed))
    assert (
        "optimizer.lr=0.5" not in overrides.read_text() and (killed / "damaged" / ".hydra" / "overrides.yaml").is_file()
    )


def random_damage(path: Path, rng: random.Random) -> None:
    """Flip a bit, cut the file off, or zero, repeat or remove a part of it."""
    content = path.read_bytes()
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.choice((1, 16, 200)))
    path.write_bytes(
        rng.choice((
            content[:start] + bytes([content[start] ^ 1 << rng.randrange(8)]) + content[start + 1 :],
            content[:start],
            content[:start] + bytes(end - start) + content[end:],
            content[:end] + content[start:],
            content[:start] + content[end:],
        ))
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        ".hydra/config.yaml",
        ".hydra/overrides.yaml",
        ".hydra/conf/config.yaml",
        "tokenizer/tokenizer.json",
        "metrics.jsonl",
    ],
)
def test_random_damage_is_repaired_or_refused_without_a_traceback(
    uninterrupted: Path, tmp_path: Path, name: str
) -> None:
    ends: Counter[str] = Counter()
    for seed in range(20):
        run = kill(uninterrupted, tmp_path / f"run{seed}")
        random_damage(run / name, random.Random(seed))
        try:
            messages = recover_run(run)
            load_saved_config(run)
            load_overrides(run)
            ends["repaired" if messages else "used"] += 1
        except UserError:
            ends["refused"] += 1
        state = read_newest_state(run)
        assert state is not None
        JsonlLog(run / "metrics.jsonl", 2, SavedLogs.of_state(state)).close()
        shutil.rmtree(run)
    assert sum(ends.values()) == 20 and ends["refused"] < 10, ends


def test_new_run_is_refused_where_records_of_a_lost_run_are(killed: Path) -> None:
    shutil.rmtree(killed / "checkpoints")
    (killed / "run.json").unlink()
    before = contents(killed)
    with pytest.raises(UserError, match="records of a run whose run.json and checkpoints are gone"):
        RunMetadata.open(killed)
    assert contents(killed) == before


def test_printing_the_config_of_a_damaged_run_repairs_nothing(call: Call, killed: Path) -> None:
    (killed / ".hydra" / "config.yaml").write_text("{")
    before = contents(killed)
    result = call("--cfg", "job", f"resume={killed}")
    assert result.returncode == 2 and f"resume={killed} restores it" in result.stderr and contents(killed) == before
