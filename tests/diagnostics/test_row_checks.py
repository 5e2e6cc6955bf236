"""Rows before the first step: marks of chat templates, labels, rows of an evaluation that were trained on; and what a
failure names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.limits import smallest_limit
from common.ownership import process_id
from data.schemas.registry import schema_of_source
from data.sources.files import Source
from data.tokenize.block import RowStats
from data.tokenize.encoder import Encoder
from data.types import EncodingConfig
from runner.diagnostics.rows import (
    TrainingOverlap,
    bad_labels,
    check_rows,
    few_labels,
    foreign_template,
    training_overlap,
)
from runner.diagnostics.symptoms import PAGE
from runner.engine.device.compile import is_out_of_memory
from runner.engine.loop import train
from runner.planning.alternatives import describe_out_of_memory, measured_parts

ROOT = Path(__file__).parents[2]
CHATML = (ROOT / "data" / "tokenize" / "chatml.jinja").read_text()
SAMPLES = ROOT / "data" / "samples"
TOKENIZER = SAMPLES / "tokenizer"


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def run_of(*files: object) -> dict:
    """run.json of a run that this machine has trained on `files`."""
    return process_id() | {
        "data": [{"file": str(file) if isinstance(file, Path) else file, "use": "training"} for file in files]
    }


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Source]:
    """`source(rows)`: a file of these rows."""

    def write(rows: list, name: str = "rows.jsonl") -> Source:
        (tmp_path / name).write_text("".join(f"{json.dumps(row) if isinstance(row, dict) else row}\n" for row in rows))
        return Source.open(tmp_path / name)

    return write


def stats_of(source: Source, data_format: str = "chat") -> RowStats:
    """The counts of a file that is tokenized with the sample's tokenizer."""
    encoding = EncodingConfig(
        data_format=data_format,
        schema=schema_of_source(source, data_format),
        tokenizer=TOKENIZER,
        max_length=512,
        too_long="truncate",
        loss_on="assistant",
        on_bad_row="skip",
    )
    return Encoder(encoding).encode(source, source.items()).stats


@pytest.mark.parametrize(
    ("file", "data_format"),
    [
        ("sft", "chat"),
        ("chat_val", "chat"),
        ("lora_identity", "chat"),
        ("arithmetic_val", "chat"),
        ("dpo", "preference"),
    ],
)
def test_row_checks_find_nothing_in_the_sample_data(file: str, data_format: str) -> None:
    assert check_rows([stats_of(Source.open(SAMPLES / f"{file}.jsonl"), data_format)], CHATML) == []


def test_messages_with_marks_of_a_template_are_named_with_its_family(source) -> None:
    rows = [chat(f"[INST] {i} [/INST]", "yes") for i in range(5)] + [chat(str(i), "no") for i in range(20)]
    symptom = foreign_template(stats_of(source(rows)), CHATML)
    assert symptom and "5 of 25 sampled rows have [INST]" in symptom.message and "another template" in symptom.message
    again = foreign_template(
        stats_of(source([chat("<|im_start|>user hi<|im_end|>", str(i)) for i in range(3)])), CHATML
    )
    assert again and "the tokenizer's template writes itself" in again.message
    assert foreign_template(stats_of(source([*rows[:2], *rows[5:]])), CHATML) is None  # two rows quote a template


def test_chosen_and_rejected_answers_are_searched_for_marks(source) -> None:
    pair = {"prompt": "hi", "chosen": "### Response: yes", "rejected": "no"}
    symptom = foreign_template(stats_of(source([pair] * 3), "preference"), CHATML)
    assert symptom and "Alpaca" in symptom.message


def test_labels_that_teach_nothing_are_named(source) -> None:
    constant, echo = (
        [chat(f"question {i}", "unknown") for i in range(30)],
        [chat(f"text {i}", f"text {i}") for i in range(30)],
    )
    assert (
        "30 of 30 sampled answers are the same text, 'unknown'"
        in (bad_labels(stats_of(source(constant))) or fail()).message
    )
    assert (
        "30 of 30 sampled answers are the same text as their question"
        in (bad_labels(stats_of(source(echo))) or fail()).message
    )
    # a classification
    assert bad_labels(stats_of(source([chat(f"question {i}", "yes" if i % 3 else "no") for i in range(30)]))) is None
    assert bad_labels(stats_of(source([chat("hello", "hi")] * 30))) is None  # one question
    assert bad_labels(stats_of(source(constant[:10]))) is None


def fail() -> None:
    raise AssertionError("no symptom")


def test_few_tokens_with_loss_are_named_with_their_share() -> None:
    assert (
        "10 of 1,000 tokens have loss (1.0%, 2.0 a row)"
        in (few_labels(RowStats(kept=5, tokens=1000, loss_tokens=10)) or fail()).message
    )
    assert few_labels(RowStats(kept=5, tokens=1000, loss_tokens=30)) is None and few_labels(RowStats()) is None


def test_first_rows_of_every_file_are_sampled(source) -> None:
    constant = [source([chat(f"question {i}", "unknown") for i in range(n, n + 60)], f"{n}.jsonl") for n in (0, 100)]
    later = source([chat(f"question {i}", f"answer {i}") for i in range(64)] + [chat("a", "a")] * 90, "later.jsonl")
    (found,) = check_rows([stats_of(file) for file in constant], CHATML)
    assert "120 of 120 sampled answers are the same text, 'unknown'" in found.message
    assert check_rows([stats_of(later)], CHATML) == []


def test_row_checks_leave_bad_rows_to_the_encoder(source) -> None:
    assert stats_of(source([chat("a", "b"), "{broken", {"other": 1}, chat("c", "d")])).sampled["rows"] == 2


def test_overlap_compares_fields_not_bytes(source) -> None:
    trained = source([{"text": "a", "id": 1}, {"text": "b", "id": 2}], "train.jsonl")
    tested = source(['{"id": 2,   "text": "b"}', {"text": "c", "id": 3}], "test.jsonl")
    assert training_overlap([tested], run_of(trained.path)) == TrainingOverlap(1, 2, f"{tested.path}:1")
    assert training_overlap([source([{"text": "z"}], "other.jsonl")], run_of(trained.path)) is None


def test_overlap_leaves_out_the_validation_files_of_the_run(source) -> None:
    rows = source([{"text": "a"}])
    fields = run_of(rows.path)
    fields["data"][0]["use"] = "validation"
    assert training_overlap([rows], fields) is None


def test_overlap_is_not_computed_without_the_training_files(
    source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = source([{"text": "a"}])
    for fields in (
        {},
        run_of(),
        run_of(tmp_path / "gone.jsonl"),
        run_of("hub:owner/name"),
        run_of(3),
        run_of(rows.path) | {"data": "x"},
    ):
        assert training_overlap([rows], fields) is None
    for limit in ("MAX_BYTES", "MAX_TRAINING_FILES", "MAX_TRAINING_ROWS"):
        with monkeypatch.context() as patched:
            patched.setattr(f"runner.diagnostics.rows.{limit}", 0)
            assert training_overlap([rows], run_of(rows.path)) is None


def test_overlap_reads_no_glob_folder_link_pipe_or_file_of_another_machine(source, tmp_path: Path) -> None:
    rows = source([{"text": "a"}])
    (tmp_path / "link.jsonl").symlink_to(rows.path)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("*.jsonl", "**", "", "link.jsonl", "pipe.jsonl", "nul\0.jsonl"):
        assert training_overlap([rows], run_of(f"{tmp_path}/{name}")) is None
    assert training_overlap([rows], run_of(rows.path) | {"host": "another machine"}) is None
    assert training_overlap([rows], run_of(rows.path)) is not None


def test_nonfinite_loss_names_the_rows_of_its_micro_batch_only(make_run) -> None:
    state = make_run("pretrain", "train.batch_size=1", "train.accumulation_steps=4", "train.max_steps=1")
    loss, calls = state.objective.loss, []

    def poisoned(model, batch):
        calls.append(batch.names)
        return {name: part * (math.nan if len(calls) == 3 else 1.0) for name, part in loss(model, batch).items()}

    state.objective.loss = poisoned
    train(state)
    assert json.loads((state.run_dir / "diagnosis.json").read_text())["rows"] == calls[2]
    assert (
        f"rows {calls[2][0]}; " in (state.run_dir / "train.log").read_text()
        and f"{PAGE}#nan" in (state.run_dir / "train.log").read_text()
    )


def test_lack_of_memory_is_recognized_by_type_and_text() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    )
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(
        OSError("Cannot allocate memory")
    )


def test_lack_of_memory_names_what_was_measured(make_run) -> None:
    state = make_run("pretrain", "train.max_steps=1")
    train(state)
    weights = sum(p.nbytes for p in state.model.parameters()) / 2**20
    assert (
        f"(weights {weights:.1f} MiB, gradients {weights:.1f} MiB, optimizer {2 * weights:.1f} MiB, activations, logits, program and data {200 - 4 * weights:.1f} MiB)"
        in measured_parts(state, 200 << 20)
    )


@pytest.mark.slow
def test_lack_of_memory_names_settings_that_need_less(make_run) -> None:
    """Slow: a model without memory imports more of PyTorch than a run does."""
    state = make_run("pretrain", "train.batch_size=16", "train.max_steps=1")
    message = describe_out_of_memory(
        state, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    )
    assert message.startswith("out of memory after step 0, 2.00 GiB more were asked for, the limit is ")
    size, origin = smallest_limit()
    assert f"the limit is {size / 2**30:,.2f} GiB ({origin}): peak" in message
    assert (
        "train.batch_size=8 train.accumulation_steps=2 (about" in message
        and message.endswith(f"see {PAGE}#out-of-memory")
        and "\n" not in message
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo"])
def test_small_healthy_run_of_each_stage_has_no_warning(make_run, stage: str) -> None:
    state = make_run(
        stage,
        "train.max_steps=25",
        "data.val_fraction=0.3",
        "train.eval_every=8",
        "train.batch_size=2",
        "data.max_length=128",
        rows=60,
    )
    train(state)
    warnings = [line for line in (state.run_dir / "train.log").read_text().splitlines() if line.startswith("warning: ")]
    assert [line for line in warnings if PAGE in line and "test-in-training" not in line] == []
