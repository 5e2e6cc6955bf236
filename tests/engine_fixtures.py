"""`make_run(*words)`: a small run in this process, composed from conf/ like a command line, on ragged rows made here."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner.config.compose import compose_config
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.state import TrainState

SMALL = [
    "model.hidden_size=32", "model.num_hidden_layers=2", "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=8", "model.intermediate_size=64",
    "model.max_position_embeddings=128", "data.max_length=64", "data.packing=none", "data.val_path=null", "data.val_fraction=0", "train.batch_size=4", "train.accumulation_steps=1", "train.epochs=1",
    "train.max_steps=0", "train.log_every=1", "train.eval_every=0", "train.save_every=0", "train.sample_every=0", "optimizer=adamw", "optimizer.lr=1e-3", "schedule.warmup_steps=0", "tracker.console=quiet",
    "init_from=scratch",
]  # fmt: skip
WORDS = ["the", "lake", "of", "Oru", "lies", "north", "of", "the", "old", "mill", "where", "Tami", "keeps", "nine", "grey", "goats", "and", "sings"]


def said(i: int) -> str:
    """Ragged on purpose: 1 to 15 words."""
    return " ".join(WORDS[(i * 7 + k) % len(WORDS)] for k in range(1 + (i * 11) % 15))


def row(kind: str, i: int) -> dict:
    talk = [{"role": "user", "content": said(i)}, {"role": "assistant", "content": said(i + 1)}]
    if kind == "text":
        return {"text": said(i) + " " + said(i + 3)}
    if kind == "chat":
        return {"conversations": talk + talk[: 2 * (i % 2)]}
    return {"chosen": talk, "rejected": [talk[0], {"role": "assistant", "content": said(i + 2)}]}


KIND = {"pretrain": "text", "sft": "chat", "lora": "chat", "dpo": "preference", "dpo_lora": "preference"}


def small(stage: str) -> list[str]:
    adapters = ["stage.lora={rank:8,alpha:16.0,dropout:0.0,targets:[q_proj,k_proj,v_proj,o_proj]}"] if stage in ("lora", "dpo_lora") else []
    return [f"stage={stage}", *SMALL, *adapters]


def written(folder: Path, stage: str, rows: int) -> Path:
    path = folder / f"{KIND[stage]}{rows}.jsonl"
    path.write_text("".join(json.dumps(row(KIND[stage], i)) + "\n" for i in range(rows)))
    return path


@pytest.fixture
def words_of(tmp_path):
    """The words of a small run, its rows written."""

    def words_of(stage: str, *words: str, rows: int = 36) -> list[str]:
        return [*small(stage), f"data.path={written(tmp_path, stage, rows)}", f"data.cache={tmp_path / 'cache'}", *words]

    return words_of


@functools.cache
def composed(*words: str) -> Config:
    """Half of a small run's time is Hydra's, and most tests begin the same few runs."""
    return compose_config(list(words))


@pytest.fixture
def make_run(tmp_path):
    torch.set_num_threads(1)

    def make(stage: str, *words: str, folder: str = "run", rows: int = 36, attempt: int = 1, metadata: dict | None = None) -> TrainState:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        cfg = copy.deepcopy(composed(*small(stage), "data.path=here", "data.cache=here", *words))
        if cfg.data.cache == "here":
            cfg.data.cache = str(tmp_path / "cache")
        if cfg.data.path == "here":
            cfg.data.path = str(written(tmp_path, stage, rows))
        fields = {} if metadata is None else metadata
        return build_run(cfg, where, attempt=attempt, update_metadata=lambda **changes: fields.update(changes))

    return make


@pytest.fixture
def on_ranks(tmp_path):
    """`on_ranks(2, [{"folder": ..., "words": ...}, ...])` trains each of these, one after the other, on two processes (see rank_script.py)."""
    groups = []

    def train(size: int, trainings: list[dict]) -> None:
        groups.append(size)
        meeting = f"file://{tmp_path / f'meeting{len(groups)}'}"
        common = {**os.environ, "WORLD_SIZE": str(size), "RUNNER_RENDEZVOUS": meeting, "OMP_NUM_THREADS": "1"}
        (plan := tmp_path / f"plan{len(groups)}.json").write_text(json.dumps(trainings))
        command = [sys.executable, str(Path(__file__).parent / "engine" / "rank_script.py"), str(plan)]
        ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]
        try:
            assert [rank.wait(600) for rank in ranks] == [0] * size
        finally:
            for rank in ranks:
                rank.kill()

    return train


@pytest.fixture
def logged():
    def read(folder: Path, kind: str = "train") -> list[dict]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == kind]

    return read
