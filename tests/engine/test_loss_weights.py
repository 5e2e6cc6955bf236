"""Fractional weights of messages: the loss of a step is sum(w * nll) / sum(w), however its rows are divided or packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from row_fixtures import RandomRows
from tiny_models import TOP_TWO, config

from common.errors import Interrupted
from data.batching.batch import Batch, collate
from data.batching.packing import best_fit_plan
from data.types import EncodedRow, TokenSequence
from models.decoder import Decoder
from runner.engine.evaluation import evaluate_loss
from runner.engine.loop import train, train_step
from runner.engine.objectives.config import NextToken
from runner.engine.state import TrainState
from runner.engine.step_metrics import fetch_results
from runner.engine.verify_resume import diff_run_dirs

WEIGHTS = [0.5, 3.0, 0.125, 1.0]


class WeightedRows(RandomRows):
    """Two of three rows have fractional weights."""

    def __getitem__(self, i: int) -> EncodedRow:
        row = super().__getitem__(i)
        [(ids, loss_mask)] = row.sequences
        weights = np.where(loss_mask, np.resize(np.array(WEIGHTS, np.float32), len(ids)), np.float32(0))
        return EncodedRow((TokenSequence(ids, weights if i % 3 else loss_mask),), row.name)


def plain_mean(model: torch.nn.Module, batches: list[Batch]) -> torch.Tensor:
    """sum(w * nll) / sum(w), from logits and with nothing of the objective."""
    losses, weights = [], []
    for batch in batches:
        logits = model(**batch.inputs_without_labels).logits.flatten(0, 1)
        losses.append(F.cross_entropy(logits, batch.labels.flatten(), reduction="none", ignore_index=-100))
        weights.append(((batch.labels != -100).float() if batch.loss_weights is None else batch.loss_weights).flatten())
    return (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()


def close(model: torch.nn.Module, loss: torch.Tensor, expected: torch.Tensor) -> None:
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for gradient, other in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5)


def test_loss_weights_give_the_weighted_mean_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, objective, rows = (
        Decoder(config(vocab_size=300, num_hidden_layers=1)),
        NextToken(),
        WeightedRows([5, 17, 9, 20, 12, 3, 16], vocab_size=300),
    )
    unpacked = collate([[rows[i]] for i in range(7)], pad_id=0, packed=False)
    packed = collate([[rows[i] for i in sequence] for sequence in best_fit_plan(rows.sizes, 32)], pad_id=0, packed=True)
    # the first without a tensor of weights
    parts = [collate([[rows[i]] for i in part], pad_id=0, packed=False) for part in ([0, 3], [1, 2, 4], [5, 6])]
    assert [batch.loss_weights is None for batch in (unpacked, packed, *parts)] == [False, False, True, False, False]
    for batches in ([unpacked], [packed], parts, [*parts, unpacked.as_dummy()]):
        items = sum(objective.count(batch) for batch in batches)
        assert items == pytest.approx(sum(rows[i].sequences[0].loss_mask.sum() for i in range(7)), rel=1e-6)
        loss = sum(objective.loss(model, batch)["loss"] / items for batch in batches)
        close(model, loss, plain_mean(model, [unpacked]))


def test_loss_weights_weigh_the_balance_loss_of_their_document() -> None:
    torch.manual_seed(0)
    model, rows = (
        Decoder(config(vocab_size=300, num_hidden_layers=1, **TOP_TWO)),
        WeightedRows([9, 20, 12], vocab_size=300),
    )
    batch = collate([[rows[i]] for i in range(3)], pad_id=0, packed=False)
    sums, aux = NextToken().loss(model, batch), model(**batch.inputs).aux_loss
    assert batch.loss_weights is not None
    assert sums["aux_loss"].item() == pytest.approx((aux * batch.loss_weights.sum(-1)).sum().item(), rel=1e-5) != 0


# --- runs ---


@pytest.fixture
def data_path(tmp_path: Path) -> str:
    rows = []
    for i in range(20):
        weights = WEIGHTS[i % 4], WEIGHTS[(i + 1) % 4]
        turns = [
            (
                {"role": "user", "content": f"the {i}"},
                {"role": "assistant", "content": "goats " * (1 + i * turn % 7), "weight": weight},
            )
            for turn, weight in enumerate(weights, 1)
        ]
        rows.append({"messages": [message for turn in turns for message in turn]})
    path = tmp_path / "weighted.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={path}"


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_step_with_loss_weights_is_that_of_plain_torch(
    make_run: Callable[..., TrainState], data_path: str, packing: str
) -> None:
    def step_of(size: int, steps: int) -> tuple[TrainState, float, float, int]:
        size = size if packing == "none" else size // 2
        overrides = [
            f"train.batch_size={size}",
            f"train.accumulation_steps={steps}",
            f"data.packing={packing}",
            "data.max_length=96",
        ]
        state = make_run("sft", data_path, *overrides, folder=f"{size}x{steps}")
        batches = next(state.loader.iter_epoch(0))
        expected = plain_mean(state.model, batches)
        norm = torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(expected, [p for p in state.model.parameters() if p.requires_grad])
            ]
        ).norm()
        (result,) = fetch_results(state, [train_step(state, batches, lr=1e-3)])
        assert result.means["loss"] == pytest.approx(expected.item(), rel=1e-5) and result.grad_norm == pytest.approx(
            norm.item(), rel=1e-4
        )
        assert (
            result.output.counts.items == pytest.approx(sum(state.objective.count(batch) for batch in batches))
            and result.output.counts.items % 1
        )
        assert result.output.counts.loss_tokens == sum(int((batch.labels != -100).sum()) for batch in batches)
        return state, result.means["loss"], result.grad_norm, result.output.counts.loss_tokens

    one, *whole = step_of(8, 1)
    two, *halves = step_of(4, 2)
    assert halves == pytest.approx(whole, rel=1e-4)
    for p, other in zip(one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0, atol=2e-5)


def test_evaluation_with_loss_weights_is_the_weighted_mean(make_run: Callable[..., TrainState], data_path: str) -> None:
    state = make_run("sft", data_path, "data.val_fraction=0.5", "train.batch_size=3", "train.eval_every=1")
    assert state.val_loaders
    batches = [batch for step in state.val_loaders[""].iter_epoch(0) for batch in step]
    with torch.no_grad():
        assert evaluate_loss(state)["loss"] == pytest.approx(plain_mean(state.model.eval(), batches).item(), rel=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["data.packing=best_fit", "data.num_workers=1"], id="packed"),
        pytest.param(["precision=fp16", "train.accumulation_steps=2"], id="fp16", marks=pytest.mark.slow),
    ],
)
def test_resume_with_loss_weights_is_bitwise_equal(
    make_run: Callable[..., TrainState], data_path: str, overrides: list[str]
) -> None:
    options = [
        data_path,
        "data.max_length=96",
        "model.dropout=0.1",
        "train.batch_size=2",
        "train.save_every=3",
        *overrides,
    ]
    whole = make_run("sft", *options, folder="whole")
    train(whole)
    first = make_run("sft", *options, folder="stopped")
    with pytest.raises(Interrupted):
        train(first, stop_requested=lambda: first.progress.step == 2)
    first.logger.finish("interrupted")
    torch.manual_seed(1)
    second = make_run("sft", *options, folder="stopped", attempt=2)
    train(second)
    for state in (whole, second):
        state.logger.finish("completed")
    assert diff_run_dirs(whole.run_dir, second.run_dir) == []


@pytest.mark.slow
def test_ranks_with_loss_weights_train_as_one_process(
    make_run, run_ranks, overrides_for, logged, tmp_path, data_path
) -> None:
    options = ["train.max_steps=3", "train.accumulation_steps=1"]
    overrides = [*overrides_for("sft", *options, "train.batch_size=2", "distributed=ddp"), data_path]
    run_ranks(2, [{"folder": str(tmp_path / "two"), "overrides": overrides}])
    train(make_run("sft", data_path, *options, "train.batch_size=4", folder="one"))
    one, two = (
        [(record["loss_tokens"], record["loss"]) for record in logged(tmp_path / folder)] for folder in ("one", "two")
    )
    assert len(one) == 3 and two == [(tokens, pytest.approx(loss, rel=1e-5)) for tokens, loss in one]
