import json

import pytest

from data.types import BadRowError
from runner.config.compose import compose_config
from runner.engine.data_pipeline import rows_to_hold_out
from runner.tracking.data_report import data_table


def jsonl(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def pipeline_of(make_run, tmp_path):
    """`pipeline_of({name: content}, *overrides)`: the data pipeline of a pretraining run on the folder with these
    files.
    """

    def pipeline_of(files, *overrides):
        for name, content in files.items():
            (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "files" / name).write_text(content)
        return make_run("pretrain", f"data.path={tmp_path / 'files'}", "data.val_path=auto", *overrides).pipeline

    return pipeline_of


def row_names(sequences):
    return sorted(row.name.rsplit("/", 1)[-1] for i in range(len(sequences)) for row in sequences[i])


def test_validation_fraction_of_one_row_files_holds_out_one_row(pipeline_of):
    pipeline = pipeline_of({f"{i}.txt": f"text {i}" for i in range(5)}, "data.val_fraction=0.1")
    assert (len(pipeline.train), len(pipeline.val[""])) == (4, 1)
    assert sorted(row_names(pipeline.train) + row_names(pipeline.val[""])) == [f"{i}.txt:1" for i in range(5)]


def test_few_validation_rows_are_named_at_the_start_of_a_run_that_evaluates(pipeline_of):
    files = {"a.jsonl": jsonl(*(f"row {i}" for i in range(40)))}
    for overrides, expected in (
        ((), ["validation has 4 rows"]),
        (("train.eval_every=0",), []),
        (("data.val_fraction=0.5",), []),
    ):
        warnings = pipeline_of(files, "data.val_fraction=0.1", "train.eval_every=5", *overrides).warnings
        assert [warning.partition(":")[0] for warning in warnings if "tiny-validation" in warning] == expected


def test_validation_fraction_auto_holds_out_enough_rows_of_a_small_file(pipeline_of):
    for total, held_out in ((2, 1), (10, 2), (49, 9), (50, 10), (91, 10), (1000, 10), (1900, 19)):
        assert rows_to_hold_out(total, "auto") == held_out
    # of a run that was started when this was the default
    assert [rows_to_hold_out(total, 0.01) for total in (91, 1900)] == [1, 19]
    files = {"a.jsonl": jsonl(*(f"row {i}" for i in range(91)))}
    pipeline = pipeline_of(files, "data.val_fraction=auto", "train.eval_every=5")
    assert (len(pipeline.train), len(pipeline.val[""])) == (81, 10) and not [
        line for line in pipeline.warnings if "tiny-validation" in line
    ]


@pytest.mark.slow
def test_validation_fraction_is_that_of_all_files_together(pipeline_of):
    pipeline = pipeline_of(
        {f"{i}.jsonl": jsonl(*(f"{letter} {i}" for letter in "abc")) for i in range(40)}, "data.val_fraction=0.1"
    )
    assert (len(pipeline.train), len(pipeline.val[""])) == (108, 12)


def test_validation_file_beside_its_file_is_found_in_a_folder(pipeline_of):
    pipeline = pipeline_of(
        {"a.v1.jsonl": jsonl("one", "two"), "a.v1_val.jsonl": jsonl("three"), "b.jsonl": jsonl("four")}
    )
    assert row_names(pipeline.train) == ["a.v1.jsonl:1", "a.v1.jsonl:2", "b.jsonl:1"] and row_names(
        pipeline.val[""]
    ) == ["a.v1_val.jsonl:1"]


def test_row_counts_of_each_file_are_in_the_data_table(pipeline_of):
    pipeline = pipeline_of(
        {"a.jsonl": jsonl("one", " ", "two")},
        "data.on_bad_row=skip",
        "data.max_bad_fraction=0.5",
        "data.val_fraction=0",
    )
    (file,) = pipeline.files
    assert (file["read"], file["kept"], file["bad"]) == (3, 2, {"empty text": 1}) and file["first_seen"][
        "empty text"
    ].endswith("a.jsonl:2")
    header, row, *reason = data_table(pipeline.files).splitlines()
    assert header.split()[2:5] == ["schema", "read", "kept"] and row.split()[:4] == ["a.jsonl", "text", "3", "2"]
    assert " ".join(" ".join(reason).split()).startswith("bad 1: empty text (first: ") and reason[-1].endswith(
        "a.jsonl:2)"
    )


def test_copies_made_by_weights_never_share_a_packed_sequence(pipeline_of):
    files = {"a.jsonl": jsonl("a rare row", "another"), "b.jsonl": jsonl(*(f"row {i} of many" for i in range(40)))}
    folder = pipeline_of(files, "data.val_fraction=0").files[0]["file"].rsplit("/", 1)[0]
    paths = f"data.path=[{folder}/a.jsonl,{folder}/b.jsonl]"
    train = pipeline_of(files, paths, "data.weights=[1,1]", "data.packing=best_fit", "data.val_fraction=0").train
    assert len(train.rows) == 80
    for epoch in range(3):
        names = [[row.name for row in train[epoch * len(train) + i]] for i in range(len(train))]
        assert all(len(set(sequence)) == len(sequence) for sequence in names) and sum(map(len, names)) == 80


def test_file_without_a_token_that_has_loss_is_refused(pipeline_of, tmp_path):
    from data.sources.files import Source
    from runner.engine.data_pipeline import check_row_stats

    data = pipeline_of({"a.jsonl": jsonl("one")}, "data.val_fraction=0")
    store = data.train.rows.sources[0].store
    store.stats.loss_tokens = 0
    with pytest.raises(ValueError, match="none of the 3 tokens has loss") as error:
        check_row_stats(store.stats, Source.open(tmp_path / "files" / "a.jsonl"), compose_config([]).data)
    assert "data.loss_on" in error.value.args[2]


def test_bad_rows_above_the_allowed_fraction_are_refused(pipeline_of):
    with pytest.raises(ValueError, match="1 of 3 rows are bad") as error:
        pipeline_of({"a.jsonl": jsonl("one", " ", "two")}, "data.on_bad_row=skip", "data.max_bad_fraction=0.2")
    assert "data.max_bad_fraction=0.34" in error.value.args[2]  # 0.33 is refused again


@pytest.mark.parametrize(
    ("bad", "ending"), [(1, "data.on_bad_row=skip data.max_bad_fraction=0.34 (1 of 3 rows are bad)"), (0, None)]
)
def test_first_bad_row_names_the_fraction_that_skipping_needs(pipeline_of, tmp_path, bad, ending):
    # 1 of 301 is below the limit
    files = {"a.jsonl": jsonl("one", " ", "two") if bad else jsonl(*map(str, range(300)), " ")}
    with pytest.raises(BadRowError) as error:
        pipeline_of(files)
    assert error.value.fix.endswith(ending or "data.on_bad_row=skip")
    overrides = error.value.fix.partition("skip such rows: ")[2].partition(" (")[0].split()
    assert len(pipeline_of(files, *overrides, "data.val_fraction=0").files) == 1


def test_skipping_is_not_proposed_where_all_rows_are_bad(pipeline_of):
    with pytest.raises(BadRowError) as error:
        pipeline_of({"a.jsonl": jsonl(" ", "")})
    assert error.value.fix == "delete the row (2 of 2 rows are bad)"


@pytest.mark.parametrize(
    "overrides, fix",
    [(["data.schema=txt"], "did you mean text"), (["stage=sft", "data.schema=text"], "stage=pretrain")],
)
def test_schema_that_does_not_exist_or_fit_the_stage_is_refused(overrides, fix):
    with pytest.raises(ValueError) as error:
        compose_config(overrides)
    assert fix in error.value.args[2] and error.value.args[1].startswith("data.schema=")


def test_validation_rows_are_packed_alike_for_every_seed(pipeline_of):
    files = {"a.jsonl": jsonl(*("text " * (1 + i % 7) for i in range(60)))}
    overrides = ["data.packing=best_fit", "data.max_length=16", "data.val_fraction=0.5", "data.val_duplicates=keep"]
    one, two = (pipeline_of(files, *overrides, f"seed={seed}") for seed in (1, 2))
    packed = [
        [
            [[row.name for row in sequences[i]] for i in range(len(sequences))]
            for sequences in (each.train, each.val[""])
        ]
        for each in (one, two)
    ]
    assert packed[0][1] == packed[1][1] and packed[0][0] != packed[1][0]


@pytest.mark.slow
def test_augmented_rows_depend_on_the_seed_of_the_run(make_run):
    def rows(seed):
        pipeline = make_run("sft", "data.system_prob=0.5", "data.system_prompts=[Be brief.]", f"seed={seed}").pipeline
        return [pipeline.train[i][0].sequences[0].ids.tolist() for i in range(len(pipeline.train))]

    assert rows(1) == rows(1) != rows(2)


def test_long_texts_are_split_and_long_conversations_are_truncated(make_run, tmp_path):
    text, path = "one two three " * 60, tmp_path / "long.jsonl"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    for stage, row, is_split in (("pretrain", {"text": text}, True), ("sft", {"messages": messages}, False)):
        path.write_text(json.dumps(row) + "\n")
        pipeline = make_run(stage, f"data.path={path}").pipeline
        (file,) = pipeline.files
        assert (len(pipeline.train) > 1, file["split"], file["truncated"]) == (
            is_split,
            int(is_split),
            int(not is_split),
        )
        assert (file["lost_loss_tokens"] == 0) == is_split
