"""A run that was killed at step 5 of 6, the same run without the kill, and every kind of damage to its directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_fixtures import TINY_RUN
from engine_fixtures import DATA_FORMAT, example

from common import paths
from runner.run_dir.contents import RUN_FILE

STEPS, KILLED_AT, SAVED = 6, 5, 4  # the checkpoints before the kill are those of steps 2 and 4
LORA = "stage.lora={rank:4,alpha:8.0,dropout:0.0,targets:[q_proj,v_proj],rslora:false,dora:false,quantize:null,continue_adapter:false}"
STAGES = {"pretrain": ["stage=pretrain", "init_from=scratch"], "lora": ["stage=lora", LORA], "dpo": ["stage=dpo"]}


def train_reference(root: Path, stage: str, init_from: Path | None) -> Path:
    """Train all steps in `root`/uninterrupted with a checkpoint at every second; return the directory."""
    from runner.cli.entrypoint import train_command

    (root / "rows.jsonl").write_text("".join(json.dumps(example(DATA_FORMAT[stage], i)) + "\n" for i in range(24)))
    run = root / "uninterrupted"
    steps = [
        f"train.max_steps={STEPS}",
        "train.save_every=2",
        "train.keep_every=2",
        "train.log_every=1",
        "train.sample_every=2",
    ]
    prompts = ["train.sample_prompts=[goats]", "train.sample_tokens=2"] if stage == "pretrain" else []
    start = [f"init_from={init_from}"] if init_from else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "REPO_ROOT", root)
        patch.setenv("OMP_WAIT_POLICY", "passive")
        train_command(
            [
                *TINY_RUN,
                *steps,
                *STAGES[stage],
                *prompts,
                *start,
                f"data.path={root / 'rows.jsonl'}",
                "schedule.warmup_steps=1",
                f"hydra.run.dir={run}",
            ],
        )
    return run


def kill(uninterrupted: Path, run: Path) -> Path:
    """Copy the run to `run` as a SIGKILL after step 5 would have left it."""
    shutil.copytree(uninterrupted, run)
    shutil.rmtree(run / "model", ignore_errors=True)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    (run / "checkpoints" / "latest").write_text(f"step-{SAVED:08d}\n")
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= KILLED_AT))
    passing = {
        "status": "running",
        "outcome": None,
        "step": SAVED,
        "checkpoint": f"step-{SAVED:08d}",
        "metrics": {},
        "export": None,
    }
    edit_json(run / RUN_FILE, lambda fields: {**fields, **passing})
    return run


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def cut(path: Path) -> None:
    """Leave the first half of the file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@dataclass(frozen=True)
class Damage:
    """`apply(run)` damages the directory. `message`: part of what the resume says; "": it prints nothing."""

    apply: Callable[[Path], object]
    message: str = ""
    is_refused: bool = False
    loses_records: bool = False  # of metrics.jsonl or samples.jsonl


def on(name: str, change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: change(run / name)


def fields(**values: object) -> Callable[[Path], object]:
    return on(RUN_FILE, lambda path: edit_json(path, lambda content: {**content, **values}))


def foreign(*names: str) -> Callable[[Path], object]:
    def write(run: Path) -> None:
        for name in names:
            (run / name).write_bytes(b"\0\1\2")

    return write


def without_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def empty_checkpoints(run: Path) -> None:
    without_checkpoints(run)
    (run / "checkpoints").mkdir()


def both(first: Callable[[Path], object], second: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: (first(run), second(run))


LATEST, OLDER = f"checkpoints/step-{SAVED:08d}", f"checkpoints/step-{SAVED - 2:08d}"
CONFIG, OVERRIDES, COPY = ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/conf/schedule/cosine.yaml"
GONE = "there is no checkpoint, and run.json names step-00000004"

RUN_JSON = {
    "run.json missing": Damage(on(RUN_FILE, Path.unlink), "run.json: missing; written again from step-00000004"),
    "run.json empty": Damage(on(RUN_FILE, lambda path: path.write_text("")), "run.json: cannot be read"),
    "run.json cut off": Damage(on(RUN_FILE, cut), "run.json: cannot be read"),
    "run.json of zeros": Damage(on(RUN_FILE, zero), "run.json: cannot be read"),
    "run.json a list": Damage(on(RUN_FILE, lambda path: path.write_text("[]")), "run.json: cannot be read"),
    "run.json not UTF-8": Damage(
        on(RUN_FILE, lambda path: path.write_bytes(b"\xff\xfe{}")), "run.json: cannot be read"
    ),
    "run.json deep": Damage(on(RUN_FILE, lambda path: path.write_text("[" * 100_000)), "run.json: cannot be read"),
    "attempt a text": Damage(fields(attempt="one"), "attempt is not of type int"),
    "step a list": Damage(fields(step=[4]), "step is not of type int"),
    "exact a number": Damage(fields(exact=1), "exact is not of type bool"),
    "init_from a list": Damage(fields(init_from=["/"]), "init_from is not of type str"),
    "fingerprints a text": Damage(fields(fingerprints="x"), "fingerprints is not of type dict"),
    "status unknown": Damage(fields(status="?"), "unknown status"),
    "run.json of another run": Damage(
        fields(id="0" * 16, attempt=7, step=900, init_from="/another"), "of another run than the checkpoints"
    ),
    "run.json older than the checkpoint": Damage(fields(step=2, checkpoint="step-00000002")),
    "run.json from before the first checkpoint": Damage(fields(step=0, checkpoint=None)),
    "run.json newer than the checkpoint": Damage(
        fields(step=6, checkpoint="step-00000006"), "checkpoints/step-00000006: missing"
    ),
}
SETTINGS = {
    "config.yaml missing": Damage(on(CONFIG, Path.unlink), ".hydra/config.yaml: missing; restored"),
    "config.yaml empty": Damage(on(CONFIG, lambda path: path.write_text("")), ".hydra/config.yaml: cut off"),
    "config.yaml cut off": Damage(on(CONFIG, cut), ".hydra/config.yaml: "),
    "config.yaml of zeros": Damage(on(CONFIG, zero), ".hydra/config.yaml: cannot be read"),
    "config.yaml without a section": Damage(
        on(CONFIG, lambda path: path.write_text(path.read_text().replace("\nschedule:", "\nschedul:"))),
        "without the settings schedule",
    ),
    "config.yaml without a setting": Damage(
        on(CONFIG, lambda path: path.write_text(path.read_text().replace("  accumulation_steps: 1\n", ""))),
        "without the settings train.accumulation_steps",
    ),
    "overrides.yaml missing": Damage(on(OVERRIDES, Path.unlink), ".hydra/overrides.yaml: missing"),
    "overrides.yaml cut off": Damage(on(OVERRIDES, cut), ".hydra/overrides.yaml: cut off"),
    "overrides.yaml a mapping": Damage(
        on(OVERRIDES, lambda path: path.write_text("a: 1\n")), "not a list of overrides"
    ),
    "hydra.yaml missing": Damage(on(".hydra/hydra.yaml", Path.unlink)),
    "hydra.yaml of zeros": Damage(on(".hydra/hydra.yaml", zero)),
    "copy of conf missing": Damage(on(COPY, Path.unlink), f"{COPY}: missing"),
    "copy of conf cut off": Damage(on(COPY, cut), f"{COPY}: cut off"),
    "copy of conf of zeros": Damage(on(COPY, zero), f"{COPY}: cannot be read"),
    "conf missing": Damage(on(".hydra/conf", shutil.rmtree), ".hydra/conf/config.yaml: missing"),
    ".hydra missing": Damage(on(".hydra", shutil.rmtree), ".hydra/config.yaml: missing"),
    ".hydra and run.json missing": Damage(
        both(on(".hydra", shutil.rmtree), on(RUN_FILE, Path.unlink)), "run.json: missing"
    ),
}
TOKENIZER = {
    "tokenizer missing": Damage(on("tokenizer", shutil.rmtree), "tokenizer/tokenizer.json: missing; copied again"),
    "tokenizer.json cut off": Damage(on("tokenizer/tokenizer.json", cut), "tokenizer/tokenizer.json: not the file"),
    "tokenizer_config.json missing": Damage(
        on("tokenizer/tokenizer_config.json", Path.unlink), "tokenizer/tokenizer_config.json: missing"
    ),
    "tokenizer of an unknown source": Damage(
        both(on("tokenizer/tokenizer.json", cut), on(LATEST, lambda path: reseal(path, tokenizer_source="/nowhere"))),
        "tokenizer/tokenizer.json",
        is_refused=True,
    ),
}
CHECKPOINTS = {
    "checkpoints gone": Damage(without_checkpoints, GONE, is_refused=True),
    "checkpoints not mounted": Damage(empty_checkpoints, GONE, is_refused=True),
    "checkpoints incomplete": Damage(
        both(empty_checkpoints, on("checkpoints/.tmp-step-00000004-1-aa", Path.mkdir)), GONE, is_refused=True
    ),
    "checkpoints and run.json gone": Damage(
        both(without_checkpoints, on(RUN_FILE, Path.unlink)), "no run.json", is_refused=True
    ),
    "checkpoints gone, run.json cut off": Damage(
        both(without_checkpoints, on(RUN_FILE, cut)), "no whole checkpoint", is_refused=True
    ),
    "all checkpoints damaged": Damage(
        both(on(f"{LATEST}/model.safetensors", cut), on(f"{OLDER}/model.safetensors", cut)),
        "no checkpoint",
        is_refused=True,
    ),
    "newest checkpoint damaged": Damage(on(f"{LATEST}/model.safetensors", zero), "skipped"),
    "newest checkpoint deleted": Damage(on(LATEST, shutil.rmtree), "checkpoints/step-00000004: missing"),
    "newest checkpoint damaged, run.json missing": Damage(
        both(on(f"{LATEST}/optimizer.safetensors", cut), on(RUN_FILE, Path.unlink)), "written again from step-00000002"
    ),
    "hints damaged": Damage(
        both(
            on("checkpoints/latest", lambda path: path.write_text("step-99999999\n")),
            on("checkpoints/best", lambda path: path.write_bytes(b"\0")),
        )
    ),
}
JUNK = (".DS_Store", ".nfs0001", "Thumbs.db", "._x", "x~", "#x#", ".x.swp")
FOREIGN = {
    "files in a checkpoint": Damage(foreign(*(f"{LATEST}/{name}" for name in JUNK))),
    "folder in a checkpoint": Damage(on(f"{LATEST}/@eaDir", Path.mkdir)),
    "files in checkpoints": Damage(
        foreign(*(f"checkpoints/{name}" for name in (*JUNK, "step-00000009", "step-00000004.bak", "step-x", "best-x")))
    ),
    "copy of a checkpoint": Damage(lambda run: shutil.copytree(run / LATEST, run / f"{LATEST} (copy)")),
    "files in the run": Damage(foreign(*JUNK, "metrics.jsonl~", "._metrics.jsonl", "run.json~")),
    "files in .hydra": Damage(
        foreign(
            ".hydra/.DS_Store", ".hydra/._config.yaml", ".hydra/conf/._config.yaml", ".hydra/conf/schedule/.nfs1.yaml"
        )
    ),
    "file in tokenizer": Damage(foreign("tokenizer/.DS_Store", "tokenizer/._tokenizer.json")),
}
OTHER = {
    "train.log missing": Damage(on("train.log", Path.unlink)),
    ".owner.json damaged": Damage(on(".owner.json", lambda path: path.write_text('{"ranks": 3, "host": []}'))),
    "diagnosis.json damaged": Damage(on("diagnosis.json", lambda path: path.write_text("{"))),
}
LOGS = {
    "metrics missing": Damage(on("metrics.jsonl", Path.unlink), "metrics.jsonl is missing", loses_records=True),
    "metrics empty": Damage(
        on("metrics.jsonl", lambda path: path.write_text("")), "metrics.jsonl is 0 bytes", loses_records=True
    ),
    "metrics cut off": Damage(on("metrics.jsonl", cut), "metrics.jsonl is ", loses_records=True),
    "metrics of zeros": Damage(on("metrics.jsonl", zero), "damaged/metrics.jsonl", loses_records=True),
    "metrics with a half line": Damage(
        on("metrics.jsonl", lambda path: path.write_text(path.read_text().replace('"kind"', "", 1))),
        "changed since the checkpoint",
        loses_records=True,
    ),
    "samples missing": Damage(on("samples.jsonl", Path.unlink), "samples.jsonl is missing", loses_records=True),
}
KINDS = {
    "metrics.jsonl a folder": Damage(
        both(on("metrics.jsonl", Path.unlink), on("metrics.jsonl", Path.mkdir)), "a folder, not a file", is_refused=True
    ),
    "tokenizer a file": Damage(
        both(on("tokenizer", shutil.rmtree), on("tokenizer", Path.touch)), "a file, not a folder", is_refused=True
    ),
    "run.json a folder": Damage(
        both(on(RUN_FILE, Path.unlink), on(RUN_FILE, Path.mkdir)), "a folder, not a file", is_refused=True
    ),
}
DAMAGES = {**KINDS, **RUN_JSON, **SETTINGS, **TOKENIZER, **CHECKPOINTS, **FOREIGN, **OTHER, **LOGS}


def reseal(checkpoint: Path, **recorded: object) -> None:
    """Change fields of run.json in a checkpoint, with right checksums."""
    from common.filesystem import dump_sealed_json, load_sealed_json, write_hashed_file

    state, manifest = checkpoint / "state.json", checkpoint / "MANIFEST.json"
    content = json.loads(state.read_text())
    content["run"]["fields"] |= recorded
    body = load_sealed_json(manifest.read_bytes())
    state.unlink()
    body["files"]["state.json"] = write_hashed_file(state, json.dumps(content).encode())
    manifest.write_bytes(dump_sealed_json(body))
