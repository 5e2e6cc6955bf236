"""Runs that are broken on purpose, each by train.py: the console, train.log and report.html name the cause and the
override.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.limits import allocating_at_most
from data.store.reader import TokenStore

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = [title.lower().replace(" ", "-") for title in re.findall(r"(?m)^## (.+)$", PAGE)]  # anchors
TINY = [
    "model.hidden_size=32", "model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1", "model.head_dim=16", "model.intermediate_size=32",
    "device=cpu", "data.max_length=64", "data.packing=none", "optimizer=adamw", "optimizer.lr=1e-3", "train.batch_size=4", "train.log_every=1", "train.eval_every=0",
    "train.save_every=0", "train.sample_every=0", "init_from=scratch",
]  # fmt: skip
VOCABULARY = "the lake of Oru lies north of the old mill where Tami keeps nine grey goats and sings".split()


def text(i: int, length: int = 12) -> str:
    return " ".join(VOCABULARY[(i * 7 + k * (1 + i % 3)) % len(VOCABULARY)] for k in range(length))


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(count: int, first: int = 0) -> list[dict]:
    return [{"text": f"{i} {text(i)}"} for i in range(first, first + count)]


def chats(count: int, answer: Callable[[int], str] = text, question: Callable[[int], str] = text) -> list[dict]:
    return [
        {"conversations": [{"role": "user", "content": question(i)}, {"role": "assistant", "content": answer(i + 1)}]}
        for i in range(count)
    ]


class Broken(NamedTuple):
    """A run that has ended."""

    code: int
    console: str
    folder: Path

    def names(self, section: str, *parts: str) -> bool:
        """Whether console, train.log and report.html have one warning with the parts, which leads to a section of the
        page that exists.
        """
        link = f"docs/guide/troubleshooting.md#{section}"
        page = unescape((self.folder / "report.html").read_text(encoding="utf-8"))
        joined = " ".join(self.console.split())
        lines = [
            line
            for line in (self.folder / "train.log").read_text().splitlines()
            if line.startswith("warning: ") and link in line
        ]
        assert len(lines) == 1, (section, lines, self.console)
        assert all(part in lines[0] for part in parts), (parts, lines[0])
        assert section in SECTIONS
        warning = lines[0].removeprefix("warning: ")
        return warning in joined and warning in " ".join(page.split())


@pytest.fixture
def train(call, tmp_path: Path) -> Callable[..., Broken]:
    """`train(stage, *overrides)` executes train.py in this process, on a tiny model."""
    torch.set_num_threads(1)

    def run(stage: str, *overrides: str, folder: str = "run") -> Broken:
        validation = (
            []
            if any(override.startswith("data.val_path=") for override in overrides)
            else ["data.val_path=null", "data.val_fraction=0"]
        )
        ended = call(f"stage={stage}", *TINY, *validation, f"hydra.run.dir={tmp_path / folder}", *overrides)
        return Broken(ended.returncode, ended.stdout + ended.stderr, tmp_path / folder)

    return run


@pytest.mark.slow
def test_run_that_is_too_hot_names_the_learning_rate(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", texts(80))
    run = train("pretrain", f"data.path={data}", "optimizer.lr=3", "train.max_steps=30")
    assert run.names("diverging", "training diverges", "optimizer.lr=0.3 (now 3)")


@pytest.mark.slow
def test_run_that_kills_its_model_ends_as_diverged(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", texts(80))
    run = train(
        "pretrain", f"data.path={data}", "optimizer=muon", "optimizer.lr=100", "train.max_steps=12", "train.log_every=4"
    )
    record = json.loads((run.folder / "run.json").read_text())
    assert (
        run.code == 1
        and record["outcome"] == "diverged"
        and run.names("diverging", "exactly 0", "this model learns nothing any more")
    )


@pytest.mark.slow
def test_run_that_is_too_cold_names_the_learning_rate(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", texts(80))
    run = train("pretrain", f"data.path={data}", "optimizer.lr=1e-7", "train.max_steps=40")
    assert run.code == 0 and run.names(
        "loss-flat", "nothing is learnt", "of 40 steps", "optimizer.lr=1e-06 (now 1e-07)"
    )


@pytest.mark.slow
def test_run_on_rows_of_another_template_names_its_marks(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", chats(40, question=lambda i: f"[INST] {text(i)} [/INST]"))
    run = train("sft", f"data.path={data}", "train.max_steps=2")
    assert run.code == 0 and run.names("wrong-template", "40 of 40 sampled rows", "[INST]", "Llama 2")


@pytest.mark.slow
def test_run_that_truncates_names_the_length_that_keeps_the_answers(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", chats(40, answer=lambda i: text(i, 60)))
    run = train("sft", f"data.path={data}", "data.max_length=48", "train.max_steps=2")
    assert run.code == 0 and run.names(
        "truncation", "data.max_length=48 cuts off", "of the tokens with loss", "keeps 99%"
    )


@pytest.mark.slow
def test_run_that_overfits_names_its_best_step(train, tmp_path: Path) -> None:
    training, validation = (
        write(tmp_path / "rows.jsonl", texts(8)),
        write(tmp_path / "val.jsonl", [{"text": text(i * 5 + 3, 20)} for i in range(40)]),
    )
    steps = ["train.max_steps=90", "train.eval_every=6", "optimizer.lr=1e-2", "train.batch_size=8"]
    run = train("pretrain", f"data.path={training}", f"data.val_path={validation}", *steps)
    best = min(
        (json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines() if '"eval"' in line),
        key=lambda record: record["loss"],
    )
    assert run.code == 0 and best["step"] < 90
    assert run.names(
        "overfitting",
        f"best at step {best['step']}",
        "the training loss fell",
        f"train.max_steps={best['step']}",
        "train.patience=2",
    )


@pytest.mark.slow
def test_run_that_waits_for_data_names_the_workers(train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token store is on a slow disk: reading a row takes 50 ms, many times what a busy machine needs to compute it."""
    read = TokenStore.read
    monkeypatch.setattr(TokenStore, "read", lambda store, row: (time.sleep(0.05), read(store, row))[1])
    data = write(tmp_path / "rows.jsonl", texts(80))
    run = train("pretrain", f"data.path={data}", "train.batch_size=8", "train.max_steps=9")
    assert run.code == 0 and run.names(
        "slow-data", "of the training time waits for data", "data.num_workers=0", "data.num_workers=2"
    )


@pytest.mark.slow
def test_run_without_memory_names_what_fits(train, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", [{"text": text(i, 100)} for i in range(300)])
    large = [
        "data.max_length=128",
        "train.batch_size=256",
        "model.intermediate_size=2048",
        "train.max_steps=1",
        "train.compile=off",
    ]
    train("pretrain", f"data.path={data}", "train.max_steps=1", folder="before")  # imports and threads are there
    with allocating_at_most(450 << 20):
        run = train("pretrain", f"data.path={data}", *large)
    error = json.loads((run.folder / "run.json").read_text())["error"]
    assert (
        run.code == 1
        and error.startswith("out of memory after step 0")
        and "docs/guide/troubleshooting.md#out-of-memory" in error
    )
    assert all(
        part in error
        for part in ("512.0 MiB more were asked for", "peak", "weights", "gradients", "optimizer", "in all")
    )
    assert error in run.console and error in unescape((run.folder / "report.html").read_text())
    found = re.search(r"(train.batch_size=(\d+)) (train.accumulation_steps=(\d+)) \(about", error)
    assert found and int(found[2]) * int(found[4]) == 256
    with allocating_at_most(450 << 20):
        assert train("pretrain", f"data.path={data}", *large, found[1], found[3], folder="smaller").code == 0


@pytest.mark.slow
def test_run_with_a_row_that_gives_nan_names_that_row(train, tmp_path: Path) -> None:
    """A channel that one token uses, and with it one row, overflows in the first feed-forward layer."""
    data = write(
        tmp_path / "rows.jsonl",
        [{"text": "the goats sing in the rain"}] * 30 + [{"text": "the \u00df goats"}] + [{"text": "nine goats"}] * 9,
    )
    first = train(
        "pretrain", f"data.path={data}", "model.tie_word_embeddings=false", "train.max_steps=1", folder="first"
    )
    from data.tokenize.tokenizer import Tokenizer

    weights = first.folder / "model" / "model.safetensors"
    tensors = load_file(weights)
    embeddings, layer = tensors["model.embed_tokens.weight"], "model.layers.0"
    embeddings[:, 0] = 0.0
    embeddings[Tokenizer.load(first.folder / "model").encode(" \u00df")[1:], 0] = 1.0
    tensors[f"{layer}.self_attn.o_proj.weight"][0] = 0.0
    for name in ("gate_proj", "up_proj"):
        tensors[f"{layer}.mlp.{name}.weight"][:, 0] = 1e19  # its square overflows, gradients of the other rows do not
    save_file(tensors, weights, metadata={"format": "pt"})
    settings = ["train.batch_size=1", "train.accumulation_steps=8", "train.max_steps=5"]
    run = train(
        "pretrain",
        f"init_from={first.folder / 'model'}",
        f"data.path={data}",
        "model.tie_word_embeddings=false",
        *settings,
    )
    assert run.names("nan", "not finite, update skipped", f"rows {data}:31; ", "embed_tokens")
    assert json.loads((run.folder / "diagnosis.json").read_text())["rows"] == [f"{data}:31"]


@pytest.mark.slow
def test_run_with_four_validation_rows_names_them_before_the_first_step(train, tmp_path: Path) -> None:
    training, validation = write(tmp_path / "rows.jsonl", texts(20)), write(tmp_path / "val.jsonl", texts(4, first=50))
    run = train(
        "pretrain", f"data.path={training}", f"data.val_path={validation}", "train.max_steps=2", "train.eval_every=1"
    )
    assert run.code == 0 and run.names("tiny-validation", "validation has 4 rows", "data.val_fraction=0.5")
    assert run.console.index("validation has 4 rows") < run.console.index("step 1/2")


@pytest.mark.slow
def test_run_with_few_validation_rows_names_the_interval(train, tmp_path: Path) -> None:
    rows = [{"text": text(0, 33)}, {"text": "zq \u4e09\u5343 xv"}, {"text": text(0, 31)}, {"text": "0x7f 9d"}] * 3
    training, validation = (
        write(tmp_path / "rows.jsonl", [{"text": text(0, 30 - i % 3)} for i in range(80)]),
        write(tmp_path / "val.jsonl", rows),
    )
    evaluated = ["train.eval_every=30", "train.max_steps=30", "optimizer.lr=1e-2", "train.batch_size=1"]
    run = train("pretrain", f"data.path={training}", f"data.val_path={validation}", *evaluated)
    assert run.code == 0 and run.names("tiny-validation", "validation loss of 12 rows", "+-", "data.val_fraction=0.1")


@pytest.mark.slow
def test_run_on_its_test_rows_names_them(train, call_command, tmp_path: Path) -> None:
    training, validation = (
        write(tmp_path / "rows.jsonl", texts(40)),
        write(tmp_path / "test.jsonl", texts(30, first=20)),
    )
    run = train(
        "pretrain", f"data.path={training}", f"data.val_path={validation}", "train.max_steps=2", "train.eval_every=2"
    )
    assert run.code == 0 and run.names(
        "test-in-training", "20 of 40 training rows", f"{training}:21", "data.val_duplicates=drop"
    )
    evaluated = call_command(
        "evaluate.py", f"run={run.folder}", f"data.path={validation}", "metric=perplexity", "device=cpu"
    )
    assert (
        evaluated.returncode == 0
        and "20 of 30 rows" in evaluated.stderr
        and "troubleshooting.md#test-in-training" in evaluated.stderr
    )
