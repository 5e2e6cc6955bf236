import json

import pytest

from runner.config.compose import compose_config


def text(*words):
    return "".join(json.dumps({"text": word}) + "\n" for word in words)


@pytest.fixture
def fed(make_run, tmp_path):
    """The feed of a run on these files: name -> content."""

    def fed(files, *words):
        for name, content in files.items():
            (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "files" / name).write_text(content)
        return make_run("pretrain", f"data.path={tmp_path / 'files'}", "data.val_path=auto", *words).feed

    return fed


def names(windows):
    return sorted(row.name.rsplit("/", 1)[-1] for i in range(len(windows)) for row in windows[i])


def test_files_of_one_row_each_share_one_held_out_row(fed):
    feed = fed({f"{i}.txt": f"words of {i}" for i in range(5)}, "data.val_fraction=0.1")
    assert (len(feed.train), len(feed.val)) == (4, 1)
    assert sorted(names(feed.train) + names(feed.val)) == [f"{i}.txt:1" for i in range(5)]


def test_the_share_held_out_is_that_of_all_files_together(fed):
    feed = fed({f"{i}.jsonl": text(*"abc") for i in range(40)}, "data.val_fraction=0.1")
    assert (len(feed.train), len(feed.val)) == (108, 12)


def test_a_val_file_beside_its_file_is_held_out_also_in_a_folder(fed):
    feed = fed({"a.v1.jsonl": text("one", "two"), "a.v1_val.jsonl": text("three"), "b.jsonl": text("four")})
    assert names(feed.train) == ["a.v1.jsonl:1", "a.v1.jsonl:2", "b.jsonl:1"] and names(feed.val) == ["a.v1_val.jsonl:1"]


def test_what_was_bad_and_dropped_is_told_file_by_file(fed, make_run):
    feed = fed({"a.jsonl": text("one", " ", "two")}, "data.on_bad_row=skip", "data.max_bad_fraction=0.5", "data.val_fraction=0")
    (told,) = feed.files
    assert (told["read"], told["kept"], told["bad"]) == (3, 2, {"empty text": 1}) and told["first_seen"]["empty text"].endswith("a.jsonl:2")


def test_more_bad_rows_than_allowed_stop_the_run(fed):
    with pytest.raises(ValueError) as refusal:
        fed({"a.jsonl": text("one", " ", "two")}, "data.on_bad_row=skip", "data.max_bad_fraction=0.2")
    assert "1 of 3 rows are bad" in refusal.value.args[0] and "data.max_bad_fraction=0.33" in refusal.value.args[2]


@pytest.mark.parametrize("words, what", [(["data.schema=txt"], "did you mean text"), (["stage=sft", "data.schema=text"], "stage=pretrain")])
def test_a_shape_that_cannot_be_meant_is_refused_at_the_door(words, what):
    with pytest.raises(ValueError) as refusal:
        compose_config(words)
    assert what in refusal.value.args[2] and refusal.value.args[1].startswith("data.schema=")
