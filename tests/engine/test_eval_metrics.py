"""train.eval_metrics=[exact_match]: answers generated at each evaluation, as evaluate.py does, without an effect on the
training.
"""

import json
from pathlib import Path

import pytest
import torch
from engine_fixtures import VOCABULARY, text

from common.errors import Interrupted, UserError
from runner.checkpoint.format import read_newest_state
from runner.engine import evaluation
from runner.engine.evaluation import evaluate_loss, generated_metrics, split_last_answer
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs
from runner.inference.evaluate import EvaluateConfig, evaluate
from runner.inference.evaluation_data import EvaluationData

METRICS = "train.eval_metrics=[exact_match]"
TIMES = ("time", "tokens_per_second", "data_wait", "save_stall", "peak_memory")
RUN = [
    "train.max_steps=48",
    "train.eval_every=12",
    "train.save_every=12",
    "train.batch_size=8",
    "optimizer.lr=2e-2",
    "data.max_length=128",
]


def chat(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def rows(tmp_path):
    """Rows that a small model learns in a few steps, some of them."""
    path = tmp_path / "rows.jsonl"
    turns = [[chat("user", VOCABULARY[i]), chat("assistant", text(i % 5))] for i in range(12)]
    rows = [{"messages": each} for each in (*turns, *(turns[i] + turns[i + 5] for i in range(7)))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run_of(make_run, rows):
    def run_of(*overrides, **options):
        return make_run(
            "sft", *RUN, f"data.path={rows}", f"data.val_path={rows}", "data.val_duplicates=keep", *overrides, **options
        )

    return run_of


def records(state, kind="eval"):
    lines = (state.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_exact_match_of_an_evaluation_is_that_of_evaluate(run_of, rows, packing, tmp_path):
    state = run_of(METRICS, f"data.packing={packing}", "export.weights=last")
    train(state)
    *_, last = found = [record["exact_match"] for record in records(state)]
    assert len(found) == 4 and 0 < last < 1
    data = EvaluationData(
        str(rows), columns=None, encoding=None, schema=None, on_bad_row=None, text_unit="file", turns="strict", max_length=None, loss_on=None,
        cache=str(tmp_path / "cache"),
    )  # fmt: skip
    config = EvaluateConfig(
        run="here", metric="exact_match", data=data, batch_size=5, max_new_tokens=64, show=0, tasks=[], tasks_path=None,
        limit=None, shots=None, chat_template=False, reference=None, device="cpu", dtype="fp32",
    )  # fmt: skip
    assert evaluate(config, state.run_dir / "model")["exact_match"] == last


@pytest.mark.slow
def test_generated_answers_change_no_bit_of_the_training(run_of):
    overrides = ["model.dropout=0.1", "train.max_steps=8", "train.eval_every=4"]
    train(plain := run_of(*overrides, folder="plain"))
    train(measured := run_of(*overrides, METRICS, folder="measured"))
    values = [
        [{name: value for name, value in record.items() if name not in TIMES} for record in records(state, "train")]
        for state in (plain, measured)
    ]
    assert values[0] == values[1]
    saved = [read_newest_state(state.run_dir) for state in (plain, measured)]
    assert saved[0]["rng"] == saved[1]["rng"]
    for one, two in zip(plain.model.parameters(), measured.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_run_that_is_stopped_while_it_generates_has_the_same_records(run_of, monkeypatch):
    whole = run_of(METRICS, folder="whole")
    train(whole)
    stopped, calls = run_of(METRICS, folder="stopped"), []
    generate = evaluation.generate

    def counted(*args, before_token, **options):
        def before():
            calls.append(stopped.progress.step)
            before_token()

        return generate(*args, before_token=before, **options)

    monkeypatch.setattr(evaluation, "generate", counted)
    with pytest.raises(Interrupted):
        train(stopped, lambda: calls.count(24) > 5)
    assert calls[-1] == 24 and [record["step"] for record in records(stopped)] == [12]
    resumed = run_of(METRICS, folder="stopped", attempt=2)
    train(resumed)
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


def test_at_most_64_rows_from_all_parts_of_a_set_are_answered(run_of, rows, monkeypatch):
    state, prompts = run_of(METRICS, "train.batch_size=2"), []

    def answer(state, activity, batch, limit, temperature):
        prompts.append(batch)
        return [[] for _ in batch]

    monkeypatch.setattr(evaluation, "generate_ids", answer)
    assert evaluation.MATCHED_ROWS == 64
    monkeypatch.setattr(evaluation, "MATCHED_ROWS", 5)
    assert generated_metrics(state, "") == {"exact_match": 0.0}
    held_out = state.pipeline.val[""].rows
    expected = [split_last_answer(held_out[number].sequences[0])[0] for number in (0, 4, 8, 12, 16)]
    assert [prompt for batch in prompts for prompt in batch] == expected and [len(batch) for batch in prompts] == [
        2,
        2,
        1,
    ]


@pytest.mark.parametrize("tail, least, most", [("", 1, 1), ("\n", 0.5, 0.99), (" x", 0, 0)])
def test_answer_is_right_only_whole_and_with_its_end(run_of, monkeypatch, tail, least, most):
    """The model gives the answers of the rows, and `tail` before their ends. That of the longest answer is cut off."""
    state = run_of(METRICS)
    held_out = state.pipeline.val[""].rows
    answers = iter([split_last_answer(held_out[i].sequences[0])[1][:-1] for i in range(len(held_out))])
    tail = state.tokenizer.encode(tail)
    monkeypatch.setattr(
        evaluation, "generate_ids", lambda state, name, prompts, limit, temperature: [
            (next(answers) + tail)[:limit] for _ in prompts
        ],
    )  # fmt: skip
    assert least <= generated_metrics(state, "")["exact_match"] <= most


def test_row_whose_answer_is_cut_off_is_left_out(run_of, monkeypatch):
    state = run_of(METRICS, "data.max_length=16", "train.batch_size=1")
    held_out = state.pipeline.val[""].rows
    pairs = [split_last_answer(held_out[i].sequences[0]) for i in range(len(held_out))]
    whole = [pair for pair in pairs if pair[1][-1] == state.tokenizer.eos_id]
    prompted, rest = [], iter(whole)

    def answer(state, activity, prompts, limit, temperature):
        prompted.extend(prompts)
        return [next(rest)[1][:-1] for _ in prompts]

    monkeypatch.setattr(evaluation, "generate_ids", answer)
    assert 0 < len(whole) < len(pairs) and generated_metrics(state, "") == {"exact_match": 1.0}
    assert prompted == [prompt for prompt, _ in whole]
    monkeypatch.setattr(evaluation, "split_last_answer", lambda sequence: (pairs[0][0], [5]))
    assert generated_metrics(state, "") == {}  # no row has a whole answer


@pytest.mark.slow
def test_numbers_of_each_validation_set_have_their_answers(run_of, rows):
    state = run_of(METRICS, f"data.val_path={{a: {rows}, b: {rows}}}")
    numbers = evaluate_loss(state)
    assert numbers["exact_match"] == numbers["exact_match/a"] == numbers["exact_match/b"]


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_last_answer_of_a_row_is_what_its_loss_ends_with(make_run, stage):
    state = make_run(stage, "data.val_fraction=0.3")
    held_out = state.pipeline.val[""].rows
    for number in range(len(held_out)):
        sequence = held_out[number].sequences[0]
        prompt, answer = split_last_answer(sequence)
        assert sequence.ids.tolist()[: len(prompt) + len(answer)] == prompt + answer
        assert not sequence.loss_mask[len(prompt) - 1] and sequence.loss_mask[len(prompt) :][: len(answer)].all()
        assert not sequence.loss_mask[len(prompt) + len(answer) :].any() and answer[-1] == state.tokenizer.eos_id


@pytest.mark.parametrize(
    "stage, overrides, message",
    [
        ("sft", ["train.eval_metrics=[bleu]"], r"must be a list of: exact_match, got \['bleu'\]"),
        ("sft", ["train.eval_metrics=[exact_match,perplexity]"], "must be a list of: exact_match"),
        ("pretrain", [METRICS], "needs evaluations, conversations and loss on .*stage.data_format=text"),
        ("dpo", [METRICS], "stage.data_format=preference"),
        ("sft", [METRICS, "data.loss_on=all"], "data.loss_on=all"),
        ("sft", [METRICS, "train.eval_every=0"], "train.eval_every=0"),
    ],
)
def test_metric_that_a_run_cannot_compute_is_refused(make_run, stage, overrides, message):
    with pytest.raises(UserError, match=message) as error:
        make_run(stage, "data.val_fraction=0.2", "train.eval_every=1", *overrides)
    assert "train.eval_metrics=" in error.value.setting


@pytest.mark.slow
def test_ranks_record_the_answers_of_one_process(run_ranks, overrides_for, make_run, rows, tmp_path):
    changes = [*RUN, METRICS, "train.eval_every=24", f"data.path={rows}", f"data.val_path={rows}"]
    changes.append("data.val_duplicates=keep")
    ranks = [*overrides_for("sft", *changes), "distributed.backend=gloo", "device=cpu", "train.batch_size=4"]
    trainings = [
        {"folder": str(tmp_path / strategy), "overrides": [*ranks, f"distributed={strategy}"]}
        for strategy in ("ddp", "fsdp")
    ]
    run_ranks(2, trainings)
    one = make_run("sft", *changes)
    train(one)
    expected = [record["exact_match"] for record in records(one)]
    for training in trainings:
        lines = map(json.loads, (Path(training["folder"]) / "metrics.jsonl").read_text().splitlines())
        found = [record["exact_match"] for record in lines if record["kind"] == "eval"]
        assert len(found) == 2 and found == pytest.approx(expected, abs=0.1), training["folder"]
