"""Rows that are both training and validation data, and rows that data.max_length cuts off."""

import json
import re

import numpy as np
import pytest

from common.errors import UserError
from data.batching.mixture import HoldoutSplit
from data.tokenize.block import RowStats, round_up_length, truncation_warning
from runner.engine.loop import start_or_resume


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def texts_of(sequences):
    """Return the texts of one epoch."""
    rows = [row for i in range(len(sequences)) for row in sequences[i]]
    return sorted(tuple(row.sequences[0].ids.tolist()) for row in rows)


@pytest.fixture
def run_on(make_run, tmp_path):
    """`run_on({name: texts}, *overrides)`: a pretraining run on these files."""

    def run_on(files, *overrides):
        for name, texts in files.items():
            (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "files" / name).write_text(jsonl(texts))
        return make_run("pretrain", f"data.path={tmp_path / 'files'}", "data.val_path=auto", *overrides)

    return run_on


TEXTS = [f"text number {i}" for i in range(60)]


def test_rows_on_both_sides_of_a_split_are_kept_in_validation_and_counted(run_on):
    pipeline = run_on({"a.jsonl": TEXTS * 3}, "data.val_fraction=0.1").pipeline
    validation, training = texts_of(pipeline.val[""]), texts_of(pipeline.train)
    assert len(validation) == 18 and not set(training) & set(validation)
    assert len(training) == 180 - 3 * len(set(validation))
    [warning] = pipeline.warnings
    assert warning.startswith(
        f"{180 - 18 - len(training)} of 162 training rows have the same tokens as a validation row (first: "
    )
    assert (
        "a.jsonl:" in warning
        and "are not trained on; data.val_duplicates=keep trains on them; see docs/guide/troubleshooting.md#test-in-training"
        in warning
    )


def test_rows_on_both_sides_of_a_split_of_several_files_are_found(run_on):
    pipeline = run_on(
        {"a.jsonl": TEXTS, "b.jsonl": TEXTS[::-1]}, "data.val_fraction=0.2", "data.packing=best_fit"
    ).pipeline
    assert not set(texts_of(pipeline.train)) & set(texts_of(pipeline.val[""])) and len(texts_of(pipeline.val[""])) == 24


def test_duplicates_of_validation_rows_are_trained_on_if_kept(run_on):
    pipeline = run_on({"a.jsonl": TEXTS * 3}, "data.val_fraction=0.1", "data.val_duplicates=keep").pipeline
    assert len(texts_of(pipeline.train)) == 162 and "the validation loss is too low" in pipeline.warnings[0]


def test_rows_of_a_validation_file_that_are_training_rows_are_counted(run_on):
    files = {"a.jsonl": TEXTS[:40], "a_val.jsonl": TEXTS[35:]}
    pipeline = run_on(files).pipeline
    assert (
        len(texts_of(pipeline.train)) == 40
        and "5 of 40 training rows" in pipeline.warnings[0]
        and "a.jsonl:36" in pipeline.warnings[0]
    )
    pipeline = run_on(files, "data.val_duplicates=drop").pipeline
    assert len(texts_of(pipeline.train)) == 35 and "are not trained on" in pipeline.warnings[0]


def test_split_without_duplicates_has_no_warning_and_every_row(run_on):
    pipeline = run_on({"a.jsonl": TEXTS}, "data.val_fraction=0.1").pipeline
    assert pipeline.warnings == [] and len(texts_of(pipeline.train)) == 54


def test_split_that_leaves_no_training_row_is_refused(run_on):
    with pytest.raises(UserError, match="leaves an entry of data.path without rows") as error:
        run_on({"a.jsonl": ["the same"] * 20}, "data.val_fraction=0.1")
    assert "data.val_path=null data.val_fraction=0 " in error.value.fix, "also where data.val_path names files"


def test_data_fingerprint_depends_on_the_rows_that_are_left_out(run_on):
    dropped, kept = (
        run_on({"a.jsonl": TEXTS * 2}, "data.val_fraction=0.1", f"data.val_duplicates={choice}").pipeline
        for choice in ("drop", "keep")
    )
    assert dropped.train.fingerprint != kept.train.fingerprint


@pytest.mark.parametrize("excluded", [[], [0], [44], [0, 1, 2, 20, 44], list(range(45))])
def test_excluded_rows_are_left_out_of_the_remaining_ones(excluded):
    from test_mixture import source

    remaining, _ = source(50).hold_out(5)
    part = remaining.__class__(
        remaining.source, remaining.store, remaining.split, excluded=np.array(excluded, np.int64)
    )
    all_rows = HoldoutSplit(50, 5).rows(np.arange(45))
    assert part.locate(np.arange(len(part))).tolist() == np.delete(all_rows, excluded).tolist()


# --- data.max_length --------------------------------------------------------------------------------------------------


def test_rounded_length_is_at_most_one_thirtysecond_longer():
    lengths = np.arange(1, 20_000)
    rounded = np.array([round_up_length(int(length)) for length in lengths])
    assert (rounded >= lengths).all() and (rounded <= lengths * (1 + 1 / 32)).all() and len(set(rounded.tolist())) < 400


def test_lost_tokens_by_length_add_up():
    stats = RowStats()
    stats.count_lost(100, 5000)
    assert stats.lost_loss_tokens == 4900 == sum(stats.lost_by_length.values()) and max(stats.lost_by_length) >= 5000


def test_one_long_row_gets_its_price_and_a_lower_limit():
    """25 rows are cut: 24 need 600 tokens, one needs 16,000. By token (texts), and by answer."""
    for count_rows in (RowStats.count_lost, lambda stats, first, last: stats.count_lost_answer(last - first, last)):
        stats = RowStats(loss_tokens=30_000, truncated=25)
        for _ in range(24):
            count_rows(stats, 512, 600)
        count_rows(stats, 512, 16_000)
        line = truncation_warning([stats], 512, 4096)
        assert re.search(
            r"; data.max_length=608 keeps 6\d%, data.max_length=(1\d{4}) model.max_position_embeddings=\1, 3\d times as long, keeps 99%$",
            line,
        )
    even = RowStats(loss_tokens=30_000, truncated=25)
    for _ in range(25):
        even.count_lost(512, 900)
    assert "times as long" not in truncation_warning([even], 512, 4096)


@pytest.mark.parametrize("stage", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_tokens_cut_off_warn_with_the_max_length_that_keeps_99_percent(make_run, tmp_path, capsys, stage):
    turns = [
        [
            {"role": role, "content": f"{role} {i} " * (1 + i % 9)}
            for _ in range(1 + i % 4)
            for role in ("user", "assistant")
        ]
        for i in range(40)
    ]
    rows = turns if stage == "sft" else [(turn, [*turn[:-1], {"role": "assistant", "content": "no"}]) for turn in turns]
    rows = [{"messages": row} if stage == "sft" else {"chosen": row[0], "rejected": row[1]} for row in rows]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"data.path={tmp_path / 'long.jsonl'}",
        "model.max_position_embeddings=4096",
        "train.max_steps=1",
        "tracker.console=plain",
    ]
    state = make_run(stage, *overrides, "data.max_length=100")
    start_or_resume(state)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert "data.max_length=100 cuts off" in line and line.endswith(
        "keeps 99%; see docs/guide/troubleshooting.md#truncation"
    )
    limit = int(re.findall(r"data.max_length=(\d+)", line)[-1])

    def lost_share(max_length):
        [file] = make_run(stage, *overrides, f"data.max_length={max_length}", folder=str(max_length)).pipeline.files
        return file["lost_loss_tokens"] / (file["lost_loss_tokens"] + file["loss_tokens"])

    assert f"{lost_share(100):.1%}" in line and lost_share(100) > 0.05
    assert lost_share(limit) <= 0.01 < lost_share(int(limit * 0.9))


def test_a_few_tokens_cut_off_and_split_texts_have_no_warning(make_run, tmp_path):
    (tmp_path / "text.jsonl").write_text(jsonl(["ab " * 500, "x"]))
    path = f"data.path={tmp_path / 'text.jsonl'}"
    assert make_run("pretrain", path, "data.max_length=16").pipeline.warnings == []
    [warning] = make_run("pretrain", path, "data.max_length=16", "data.too_long=truncate").pipeline.warnings
    limit = int(warning.split("; data.max_length=")[1].split()[0])
    assert f"model.max_position_embeddings={limit}" in warning and limit > 128
