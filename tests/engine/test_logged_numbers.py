"""Every number of metrics.jsonl against an independent computation: from the text of the rows, and from the weights of
the checkpoints with plain torch.
"""

import json
import math
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from engine_fixtures import DATA_FORMAT, example

from runner.engine import evaluation, loop, step_metrics
from runner.engine.loop import train
from runner.reporting.metrics import read_job_metrics

STEP, SAVE, EVALUATION, SAMPLES = 1.0, 100.0, 1000.0, 10_000.0  # seconds on the clock of the test
ROWS, VALIDATION_ROWS, BATCH, EPOCHS = 12, 6, 4, 2
IDENTIFIERS = {"kind", "step", "attempt", "time"}


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only in steps, saves, evaluations and samples."""
    now = [0.0]

    def takes(owner, name, seconds):
        function = getattr(owner, name)

        def timed(*args, **options):
            now[0] += seconds
            return function(*args, **options)

        monkeypatch.setattr(owner, name, timed)

    monkeypatch.setattr(step_metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    takes(loop, "train_step", STEP)
    takes(evaluation, "evaluate_loss", EVALUATION)
    takes(evaluation, "generate_samples", SAMPLES)
    return takes


@pytest.fixture
def run_of(make_run, tmp_path, clock, logged):
    """`run_of(stage, *overrides)`: a finished run of two epochs of three steps that saves, evaluates and samples:
    (state, its records).
    """

    def run_of(stage, *overrides):
        for name, first, count in (("train", 0, ROWS), ("held_out", 50, VALIDATION_ROWS)):
            rows = [example(DATA_FORMAT[stage], first + i) for i in range(count)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        state = make_run(
            stage, f"data.path={tmp_path / 'train.jsonl'}", f"data.val_path={tmp_path / 'held_out.jsonl'}", f"train.batch_size={BATCH // 2}",
            "train.accumulation_steps=2", f"train.epochs={EPOCHS}", "train.save_every=1", "train.keep_checkpoints=100", "train.eval_every=3", "train.sample_every=4",
            "data.max_length=128", "train.sample_prompts=[goats]", "train.sample_tokens=2", "optimizer.lr=1e-2", "optimizer.grad_clip=0.1", "schedule.warmup_steps=2", "tracker.console=plain",
            *overrides,
        )  # fmt: skip
        clock(state.checkpoints, "save_async", SAVE)
        train(state)
        return state, logged(state.run_dir), logged(state.run_dir, "eval")

    return run_of


def weights_of(state, step):
    """Return the model with the weights after `step` steps."""
    saved = safetensors.torch.load_file(state.run_dir / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    for name, parameter in state.model.named_parameters():
        parameter.data.copy_(saved[name])
    return state.model


def sequences_of(state, rows):
    """Return (ids, first token with a label) of each text or conversation: rendered here, without the encoder of the
    project.
    """
    tokenizer, sequences = state.tokenizer, []
    for row in rows:
        if "text" in row:
            sequences.append([([tokenizer.bos_id, *tokenizer.encode(row["text"]), tokenizer.eos_id], True)])
            continue
        turns = []
        for message in row["conversations"]:
            is_answer = message["role"] == "assistant"
            opening = [tokenizer.bos_id, *tokenizer.encode(f"{message['role']}\n")]
            turns += [
                (opening, False),
                ([*tokenizer.encode(message["content"]), tokenizer.eos_id], is_answer),
                (tokenizer.encode("\n"), False),
            ]
        sequences.append(turns)
    return sequences


def nll_of(model, sequence):
    """Return (sum of -log p in nats, number of labels) of a sequence of (ids, whether they have a label)."""
    ids = torch.tensor([token for part, _ in sequence for token in part])
    has_label = torch.tensor([label for part, label in sequence for _ in part])
    log_probs = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
    return -log_probs[torch.arange(len(ids) - 1), ids[1:]][has_label[1:]].sum(), int(has_label[1:].sum())


def rows_of_step(state, step):
    """Return the rows of a step by their line numbers."""
    [batches] = list(state.loader.iter_steps(step - 1, step))
    lines = (state.run_dir.parent / "train.jsonl").read_text().splitlines()
    return [json.loads(lines[int(name.rsplit(":", 1)[1]) - 1]) for batch in batches for name in batch.names]


@pytest.mark.parametrize("stage", [pytest.param("pretrain", marks=pytest.mark.slow), "sft"])
def test_logged_numbers_are_those_of_an_independent_computation(run_of, stage, capsys):
    state, records, evaluations = run_of(stage)
    assert [record["step"] for record in records] == list(range(1, 7)) and [
        record["step"] for record in evaluations
    ] == [3, 6]
    assert set(records[0]) - IDENTIFIERS == {
        "epoch", "loss_tokens", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "data_wait", "save_stall", "peak_memory"
    }  # fmt: skip
    tokens = loss_tokens = 0
    for record in records:
        step, model = record["step"], weights_of(state, record["step"] - 1) if record["step"] > 1 else None
        sequences = sequences_of(state, rows_of_step(state, step))
        step_tokens = sum(len(part) for sequence in sequences for part, _ in sequence) - len(sequences)
        tokens, loss_tokens = (
            tokens + step_tokens,
            loss_tokens + sum(sum(label * len(part) for part, label in sequence) for sequence in sequences),
        )
        if stage == "pretrain":
            loss_tokens -= len(sequences)  # nothing predicts the first token
        assert (record["tokens"], record["loss_tokens"]) == (tokens, loss_tokens)
        assert record["epoch"] == (step - 1) // (ROWS // BATCH)
        assert record["lr"] == pytest.approx(learning_rate(step - 1), rel=1e-9)
        # without save, evaluation, samples and padding
        assert record["tokens_per_second"] == pytest.approx(step_tokens / STEP)
        # torch alone takes 100 MB
        assert record["data_wait"] == 0 and 0 <= record["save_stall"] < 60 and 50e6 < record["peak_memory"] < 50e9
        if model is not None:
            parts = [nll_of(model, sequence) for sequence in sequences]
            loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
            assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
            # before clipping
            assert record["grad_norm"] == pytest.approx(norm, rel=1e-4) and norm > state.cfg.optimizer.grad_clip
    out = capsys.readouterr().out
    for record in records:  # the same numbers in the lines of the log
        [line] = [
            line
            for line in out.splitlines()
            if line.startswith(f"step {record['step']}/6 ") and "validation" not in line
        ]
        assert (
            f"| {record['tokens_per_second']:.0f} tok/s" in line
            and f"| loss {record['loss']:.3f} |" in line
            and f"gnorm {record['grad_norm']:.2f}" in line
        )
    assert read_job_metrics(state.run_dir / "metrics.jsonl").tokens_per_second == pytest.approx(
        tokens / (len(records) * STEP)
    )


def learning_rate(step):
    """Return the lr of the step after `step` steps: linear warmup over 2 steps, then half a cosine down to a tenth over
    4 steps.
    """
    if step < 2:
        return 1e-2 * (step + 1) / 2
    return 1e-2 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 4)))


@pytest.mark.parametrize("stage", [pytest.param("pretrain", marks=pytest.mark.slow), "sft"])
def test_logged_evaluation_is_that_of_an_independent_computation(run_of, stage):
    state, records, evaluations = run_of(stage)
    rows = [json.loads(line) for line in (state.run_dir.parent / "held_out.jsonl").read_text().splitlines()]
    for record in evaluations:
        assert set(record) - IDENTIFIERS == {"loss_tokens", "tokens", "loss", "perplexity"}
        with torch.no_grad():
            parts = [nll_of(weights_of(state, record["step"]), sequence) for sequence in sequences_of(state, rows)]
        loss = sum(float(part) for part, _ in parts) / sum(count for _, count in parts)
        assert record["loss"] == pytest.approx(loss, rel=1e-5) and record["perplexity"] == pytest.approx(
            math.e**loss, rel=1e-4
        )
        [trained] = [other for other in records if other["step"] == record["step"]]
        assert (record["tokens"], record["loss_tokens"]) == (trained["tokens"], trained["loss_tokens"])


@pytest.mark.slow
def test_tokens_per_second_leaves_out_saves_evaluation_and_samples(run_of):
    _, records, _ = run_of("sft", "train.log_every=3", "data.packing=best_fit", "train.save_every=2")
    before = {"step": 0, "tokens": 0}
    for record in records:
        assert record["tokens_per_second"] == pytest.approx(
            (record["tokens"] - before["tokens"]) / ((record["step"] - before["step"]) * STEP)
        )
        before = record
