"""Data files as users have them: what the obvious command trains on, what it reports, and what it refuses before torch
is imported.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_fixtures import composed

from common.errors import UserError
from data.sources import files
from data.tokenize.tokenizer import Tokenizer
from data.types import TokenSequence
from runner.config.overrides import absolutize_path
from runner.engine.data_pipeline import build_data_pipeline
from runner.engine.evaluation import prompt_of_row, sample_prompts
from runner.launch import run

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
QUESTIONS = [
    {"question": f"Where is lake {i}?", "answer": f"Lake {i} is in the north.", "id": i, "source": "maps"}
    for i in range(20)
]


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    """`pipeline(*overrides)`: checks a typed command line as train.py does before it imports torch, and returns its
    data pipeline.
    """
    monkeypatch.chdir(tmp_path)

    def pipeline(*typed):
        defaults = (
            "data=own",
            f"data.tokenizer={TOKENIZER}",
            f"data.cache={tmp_path / 'cache'}",
            "data.packing=none",
            "data.max_length=64",
        )
        cfg = composed(*defaults, *(absolutize_path(override) for override in typed))
        data_files = run.check_data(cfg.data, cfg.stage.data_format)
        with monkeypatch.context() as patched:
            patched.setattr(files, "detect_format", None)  # a file whose format is detected again fails
            checked = build_data_pipeline(cfg, Tokenizer.load(TOKENIZER), data_files)
        assert checked.train.fingerprint == build_data_pipeline(cfg, Tokenizer.load(TOKENIZER)).train.fingerprint
        return checked

    return pipeline


def write(name, rows, encoding="utf-8"):
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding=encoding)


def trained_files(pipeline):
    sequences = [sequences for sequences in (pipeline.train, *pipeline.val.values())]
    return [
        sorted({row.name.rsplit("/", 1)[-1].rpartition(":")[0] for i in range(len(part)) for row in part[i]})
        for part in sequences
    ]


def test_columns_of_a_user_s_file_are_refused_with_a_guess_that_then_trains(pipeline):
    write("qa.jsonl", QUESTIONS)
    with pytest.raises(UserError) as error:
        pipeline("stage=sft", "data.path=qa.jsonl")
    override = error.value.fix.partition("a guess is ")[2].strip("'")
    assert override == "data.columns={prompt: question, completion: answer}"
    result = pipeline("stage=sft", "data.path=qa.jsonl", override)
    assert len(result.train) == 16 and result.notes[-1] == "unused columns of qa.jsonl: id, source"


def test_data_sets_of_the_hub_are_not_resolved_before_they_are_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a.jsonl", [{"text": "a"}])
    for path in ("data.path=[a.jsonl,hub:owner/name]", "data.val_path=hub:owner/name"):
        data = composed("data=own", "data.path=a.jsonl", "data.val_path=null", path).data
        assert run.check_data(data, "text") is None


def test_unused_columns_are_reported_once_and_from_the_cache_too(pipeline):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "e.jsonl"):
        write(f"set/{name}", [{"text": f"{name} {i}", "url": "u", "n": None} for i in range(3)])
    for _ in range(2):
        assert pipeline("data.path=set").notes == ["unused columns of a.jsonl, b.jsonl, c.jsonl and 2 more: url"]
    shutil.rmtree("set")


def test_splits_of_a_folder_are_used_as_they_are_named(pipeline):
    for split, count in (("train", 5), ("validation", 2), ("test", 2)):
        write(f"set/{split}-00000-of-00001.jsonl", [{"text": f"{split} {i}"} for i in range(count)])
    result = pipeline("data.path=set")
    assert trained_files(result) == [["train-00000-of-00001.jsonl"], ["validation-00000-of-00001.jsonl"]]
    assert len(result.notes) == 1 and result.notes[0].endswith("leaves out test-00000-of-00001.jsonl")


def test_gbk_file_trains_on_the_text_it_has_and_is_reported(pipeline):
    rows = [{"text": f"第{i}只猫住在湖边的老磨坊里，每天清晨都会出来晒太阳。"} for i in range(20)]
    write("utf8/猫.jsonl", rows)
    write("gbk/猫.jsonl", rows, "gbk")
    utf8, gbk = pipeline("data.path=utf8/猫.jsonl"), pipeline("data.path=gbk/猫.jsonl")
    assert utf8.notes == [] and gbk.notes == ["猫.jsonl: encoding gb18030"]
    assert [utf8.train[i][0].sequences[0].ids.tolist() for i in range(len(utf8.train))] == [
        gbk.train[i][0].sequences[0].ids.tolist() for i in range(len(gbk.train))
    ]


def test_file_with_special_characters_in_its_name_is_one_file(pipeline):
    for name in ("my file, v=2.jsonl", "数据 (1).jsonl", "it's [x].jsonl"):
        write(name, [{"text": f"row {i}"} for i in range(4)])
        assert trained_files(pipeline(f"data.path={name}", "data.val_fraction=0")) == [[name]]


@pytest.mark.parametrize(
    "name, content, message, fix",
    [
        ("one.jsonl", '{"text": "one row"}\n', "holds out at least one row, and the data has 1", "data.val_fraction=0"),
        ("empty.jsonl", "", "the file is empty", "leave it out"),
        ("blank.txt", " \n\n", "the file is empty", "leave it out"),
        ("header.csv", "text,label\n", "the file has no rows", "leave it out"),
        ("none.json", "[]", "the file has no rows", "leave it out"),
    ],
)
def test_file_without_rows_for_training_is_refused(pipeline, name, content, message, fix):
    Path(name).write_text(content)
    with pytest.raises(UserError) as error:
        pipeline(f"data.path={name}")
    assert message in error.value.message and fix in error.value.fix


def test_one_row_is_trained_on_without_validation(pipeline):
    write("one.jsonl", [{"text": "one row"}])
    assert len(pipeline("data.path=one.jsonl", "data.val_fraction=0").train) == 1
    write("many.jsonl", [{"text": f"row {i}"} for i in range(9)])
    # an entry keeps a row
    assert trained_files(pipeline("data.path=[one.jsonl,many.jsonl]", "data.val_fraction=0.9"))[0] == [
        "many.jsonl",
        "one.jsonl",
    ]


def test_validation_path_may_be_a_glob_and_must_have_rows(pipeline):
    write("a.jsonl", [{"text": "one"}, {"text": "two"}])
    write("held/b.jsonl", [{"text": "three"}])
    assert trained_files(pipeline("data.path=a.jsonl", "data.val_path=held/*.jsonl")) == [["a.jsonl"], ["b.jsonl"]]
    Path("held/b.jsonl").write_text("")
    with pytest.raises(UserError, match="the file is empty"):
        pipeline("data.path=a.jsonl", "data.val_path=held")
    with pytest.raises(UserError, match="data.val_path does not exist"):
        pipeline("data.path=a.jsonl", "data.val_path=nowhere")


def test_evaluations_of_one_file_that_is_read_differently_are_not_comparable(pipeline):
    """Before: data.columns and data.text_unit were no part of what makes two losses comparable."""
    write("qa.jsonl", [{**row, "short": "yes"} for row in QUESTIONS])
    Path("lines.txt").write_text("one\ntwo\nthree\n")

    def rows_read(*overrides):
        return pipeline(*overrides).evaluation["data"]

    chat = ("stage=sft", "data.path=qa.jsonl", "data.val_path=qa.jsonl", "data.val_duplicates=keep")
    by_answer, by_short = (
        rows_read(*chat, f"data.columns={{prompt: question, completion: {column}}}") for column in ("answer", "short")
    )
    assert by_answer == rows_read(*chat, "data.columns={completion: answer, prompt: question}") != by_short
    text = ("data.path=lines.txt", "data.val_path=lines.txt")
    assert rows_read(*text) != rows_read(*text, "data.text_unit=line")


def test_evaluations_are_comparable_whatever_only_the_training_reads(pipeline):
    """Label smoothing, z-loss and NEFTune are no part of the loss of an evaluation, in a sweep or after a resume."""
    Path("lines.txt").write_text("one\ntwo\nthree\n")
    text = ("data.path=lines.txt", "data.val_path=lines.txt")
    changed = ("stage.label_smoothing=0.1", "stage.z_loss=1e-3", "stage.neftune_alpha=5")
    identity = pipeline(*text).evaluation
    assert pipeline(*text, *changed).evaluation == identity
    assert not any(key.startswith("stage.") and key != "stage.objective" for key in identity["loss"])


def test_columns_that_no_file_has_warn_where_the_field_itself_is_read(pipeline):
    """Before: trained on the field text, without a message."""
    write("a.jsonl", [{"text": f"a {i}", "body": f"b {i}"} for i in range(4)])
    write("b.jsonl", [{"text": f"c {i}"} for i in range(4)])
    overrides = ["data.val_fraction=0", "data.val_path=null"]
    (warning,) = pipeline("data.path=a.jsonl", "data.columns={text: bodi}", *overrides).warnings
    assert warning == "data.columns names bodi, which the first 100 rows of no file have; their columns are text, body"
    assert pipeline("data.path=[b.jsonl,a.jsonl]", "data.columns={text: body}", *overrides).warnings == []


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo"])
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_prompts_of_samples_are_beginnings_of_held_out_rows(make_run, stage, packing):
    state = make_run(stage, "train.sample_prompts=auto", "data.val_fraction=0.2", f"data.packing={packing}")
    rows = [state.pipeline.val[""].rows[number].sequences[0] for number in range(len(state.pipeline.val[""].rows))]
    prompts = [ids for _, ids in sample_prompts(state)]
    assert len(prompts) == 3 and prompts == sorted(prompts, key=len)
    for ids in prompts:
        row = next(row for row in rows if row.ids[: len(ids)].tolist() == ids)
        if stage == "pretrain":
            assert 0 < len(ids) <= len(row.ids) // 2
        else:  # up to its answer
            assert row.loss_mask[len(ids)] and not row.loss_mask[: len(ids)].any()


@pytest.mark.parametrize(
    ("mask", "length"),
    [([0] * 5 + [0.5] * 2 + [0] * 3 + [1] * 2, 5), ([0] * 12, 0), ([1] * 12, 6), ([0] + [1] * 40, 12), ([1], 0)],
    ids=["fractions", "no loss", "short text", "text", "one token"],
)
def test_prompt_of_a_row_ends_before_its_first_token_with_loss(mask, length):
    ids = np.arange(len(mask))
    assert prompt_of_row(TokenSequence(ids, np.array(mask, np.float32))) == ids[:length].tolist()


@pytest.mark.parametrize("prompts", ["hello", "null", "[[a]]", "[{a: b}]", "['']"])
def test_prompts_that_are_no_texts_are_refused(prompts):
    with pytest.raises(UserError, match="auto or a list of texts"):
        composed("stage=pretrain", f"train.sample_prompts={prompts}")


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("prompt", ["a " * 300, "'\udcff'"], ids=["too long", "not UTF-8"])
def test_prompts_that_cannot_be_sampled_are_refused_before_the_first_step(tmp_path, stage, prompt):
    from runner.engine.build import load_tokenizer

    cfg = composed(
        f"stage={stage}",
        "model.max_position_embeddings=256",
        "data.max_length=64",
        f"train.sample_prompts=[{prompt}]",
        "data.tokenizer=data/samples/tokenizer",
    )
    with pytest.raises(UserError, match="a prompt has 3|not UTF-8"):
        load_tokenizer(cfg, tmp_path)
