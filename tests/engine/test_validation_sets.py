"""data.val_path={law: FILE, chat: FILE}: each set is evaluated, the first one decides."""

import json

import pytest
from engine_fixtures import example

from common.errors import Interrupted, UserError
from data.config import VAL_PATHS
from runner.checkpoint.compatibility import run_rules
from runner.config.literals import parse_value
from runner.config.overrides import absolutize_path
from runner.engine.evaluation import evaluate_loss
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs
from runner.launch.run import check_data
from runner.run_dir.best_job import comparison_problem

RUN = ["data.val_fraction=auto", "train.max_steps=6", "train.eval_every=2", "train.save_every=2", "train.batch_size=3"]


@pytest.fixture
def sets(tmp_path):
    """Two files whose names are in the other order than the sets, and the override of both."""
    paths = {}
    for name, numbers in {"law": range(100, 130), "chat": range(40, 52)}.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps(example("chat", number)) + "\n" for number in numbers))
    return paths, f"data.val_path={{law: {paths['law']}, chat: {paths['chat']}}}"


def records(state, kind="eval"):
    lines = (state.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.parametrize("packing", [pytest.param("none", marks=pytest.mark.slow), "best_fit"])
def test_numbers_of_each_set_are_those_of_a_run_with_this_set_alone(make_run, sets, packing):
    paths, override = sets
    options = [*RUN, f"data.packing={packing}"]
    both = make_run("sft", *options, override)
    train(both)
    for name, path in paths.items():
        alone = make_run("sft", *options, f"data.val_path={path}", folder=name)
        train(alone)
        assert [(r[f"loss/{name}"], r[f"perplexity/{name}"]) for r in records(both)] == [
            (r["loss"], r["perplexity"]) for r in records(alone)
        ]
        # nor does a second set change the training
        assert [r["loss"] for r in records(both, "train")] == [r["loss"] for r in records(alone, "train")]
    decided = [(r["loss"], r["perplexity"]) for r in records(both)]
    assert decided == [(r["loss/law"], r["perplexity/law"]) for r in records(both)]
    assert both.progress.best_loss == min(loss for loss, _ in decided) and both.progress.eval_loss == decided[-1][0]


@pytest.mark.slow
def test_run_with_sets_that_is_stopped_has_the_same_records(make_run, sets, monkeypatch):
    whole, stopped = (make_run("sft", *RUN, sets[1], folder=folder) for folder in ("whole", "stopped"))
    train(whole)
    calls = iter(range(1000))
    with pytest.raises(Interrupted):
        train(stopped, lambda: next(calls) > 45)  # in an evaluation
    resumed = make_run("sft", *RUN, sets[1], folder="stopped", attempt=2)
    train(resumed)
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []
    assert [list(record) for record in records(resumed)] == [list(record) for record in records(whole)]


def test_sets_are_named_in_counts_notes_and_warnings(make_run, sets, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(json.dumps(example("chat", 7)) + "\n")
    state = make_run("sft", *RUN, f"data.val_path={{law: {sets[0]['law']}, few: {few}}}")
    assert [(file["use"], file.get("set")) for file in state.metadata.fields["data"]] == [
        ("training", None),
        ("validation", "law"),
        ("validation", "few"),
    ]
    assert "validation sets: law, few; law decides which weights are best" in state.pipeline.notes
    assert [text for text in state.pipeline.warnings if text.startswith("validation few has 1 row: ")]
    assert state.pipeline.held_out == 31 and state.pipeline.evaluation["rows"] == 30


@pytest.mark.slow
def test_resume_with_another_second_set_warns_and_keeps_the_best(make_run, sets, tmp_path):
    paths, override = sets
    train(make_run("sft", *RUN, override))
    warnings = []
    for changed, forgets in ((f"{{law: {paths['law']}}}", False), (f"{{law: {paths['chat']}}}", True)):
        resumed = make_run("sft", *RUN, f"data.val_path={changed}", attempt=2)
        resumed.logger.warning = warnings.append
        resumed.checkpoints.load_newest(resumed, resumed.compatibility, run_rules(resumed.cfg), resumed.total_steps)
        assert (resumed.progress.best_step is None) == forgets
    law = "the validation sets have changed: their numbers are of other rows from here on"
    assert [text for text in warnings if "changed" in text] == [
        law,
        law,
        "the evaluation rows or their loss have changed: best weights are chosen among the evaluations from here on",
    ]


def test_runs_are_compared_by_their_first_set(make_run, sets):
    paths, override = sets
    options = (
        override,
        f"data.val_path={paths['law']}",
        f"data.val_path={{chat: {paths['chat']}, law: {paths['law']}}}",
    )
    both, alone, other = (
        make_run("sft", *RUN, val, folder=str(number)).pipeline.evaluation for number, val in enumerate(options)
    )
    assert comparison_problem([both, alone]) is None and comparison_problem([both, other])


def test_evaluation_of_ranks_and_of_dpo_has_all_numbers_of_a_set(make_run, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(example("preference", number)) + "\n" for number in range(12)))
    state = make_run("dpo", f"data.val_path={{a: {path}, b: {path}}}", "train.eval_every=1")
    numbers = evaluate_loss(state)
    plain = [name for name in numbers if "/" not in name]
    assert "reward_accuracy" in plain
    assert list(numbers) == [*plain, *(f"{name}/{each}" for each in "ab" for name in plain)]


@pytest.mark.parametrize(
    "value", [{"a": ["b.jsonl"]}, {"a": 3}, ["a.jsonl"], 3, {"a": "auto"}, {"a/b": "c.jsonl"}, {"a": "b", "c": "auto"}]
)
def test_validation_path_that_cannot_be_read_is_refused(value):
    """Files of the name auto are those beside the training files; loss/a is a field of the set a."""
    message = r"data.val_path must be auto, a path, or paths \(not auto\) of named sets \(without /\)"
    with pytest.raises(UserError, match=message):
        VAL_PATHS.check("data.val_path", value)


def test_names_of_sets_that_yaml_reads_as_other_types_are_texts(make_run, sets):
    """2023 was a number in the list of names, which ended the run; a null path removes either spelling."""
    paths, _ = sets
    typed = f"data.val_path={{2023: {paths['law']}, true: {paths['chat']}}}"
    state = make_run("sft", *RUN, absolutize_path(typed))
    assert [*state.val_loaders] == ["2023", "true"]
    assert "validation sets: 2023, true; 2023 decides which weights are best" in state.pipeline.notes
    data = state.cfg.data
    data.val_path = {2023: "a.jsonl", "2023": None}
    assert data.val_paths == {}


@pytest.mark.parametrize("typed, name", [("{法律: a, ok: b}", "法律"), ('{"x": a}', '"x"'), ("{ok: b, a=b: a}", "a=b")])
def test_name_of_a_set_that_hydra_cannot_parse_is_refused_with_the_reason(typed, name):
    with pytest.raises(UserError, match="data.val_path is a mapping, whose names have letters a-z") as error:
        absolutize_path(f"data.val_path={typed}")
    assert error.value.message.endswith(f"without quotes: got {name}")


def test_set_whose_path_is_null_is_none(make_run, sets):
    """A resume adds to the sets that it has; null takes one away."""
    paths, override = sets
    assert [*make_run("sft", *RUN, override, "data.val_path.law=null").val_loaders] == ["chat"]
    none = make_run("sft", *RUN, override, "data.val_path={law: null}", "data.val_fraction=0")
    assert none.val_loaders == {} and not none.cfg.evaluates


def test_paths_of_sets_are_absolute_and_may_have_any_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "数据.jsonl", "b, c.jsonl"):
        (tmp_path / name).touch()
    for typed, paths in (
        ("{law: a.jsonl, chat: hub:owner/name:test}", {"law": tmp_path / "a.jsonl", "chat": "hub:owner/name:test"}),
        ("{law:a.jsonl}", {"law": tmp_path / "a.jsonl"}),
        ('{law: 数据.jsonl, chat: "b, c.jsonl"}', {"law": tmp_path / "数据.jsonl", "chat": tmp_path / "b, c.jsonl"}),
    ):
        value = parse_value(absolutize_path(f"data.val_path={typed}"))
        assert value == {name: str(path) for name, path in paths.items()} and list(value) == list(paths)
    with pytest.raises(UserError, match="must have a value for each name"):
        absolutize_path("data.val_path={law, chat: b.jsonl}")


def test_missing_file_of_a_set_is_refused_before_the_run(make_run, sets):
    data = make_run("sft", *RUN, sets[1]).cfg.data
    assert [source.val_set for source in check_data(data, "chat").validation] == ["law", "chat"]
    data.val_path = {**data.val_path, "chat": "nowhere.jsonl"}
    with pytest.raises(UserError, match="data.val_path does not exist: nowhere.jsonl") as error:
        check_data(data, "chat")
    assert error.value.setting == "data.val_path={chat: nowhere.jsonl}"
