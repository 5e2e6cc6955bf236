"""Objectives with experts, dropout and references: values and gradients against sums that are written out here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from row_fixtures import RandomRows
from tiny_models import TOP_TWO, lora_config, random_model, randomize
from torch import Tensor

from common.errors import UserError
from data.batching.batch import Batch, collate
from models.decoder import Decoder
from models.lora import adapter_state_dict, add_lora
from runner.engine.evaluation import evaluate_loss
from runner.engine.objectives.config import NextToken
from runner.engine.objectives.dpo import Dpo
from runner.engine.objectives.objective import Objective, Reference, mask_dummy_batch

LENGTHS = [3, 17, 9, 12]
EXPERTS: dict[str, Any] = TOP_TWO | {"router_aux_loss_coef": 0.5}
MOE = [
    "model.num_experts=4",
    "model.num_experts_per_tok=2",
    "model.moe_intermediate_size=32",
    "model.router_aux_loss_coef=0.5",
]


def small_model(**changes: Any) -> Decoder:
    return random_model(std=0.1, vocab_size=40, num_hidden_layers=1, **changes)


def batch_of(sequences_per_row: int = 1) -> Batch:
    rows = RandomRows(LENGTHS, sequences_per_row, vocab_size=40)
    return collate([[rows[i]] for i in range(len(rows))], pad_id=0, packed=False)


def gradients(loss: Tensor, model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, gradient in one.items():
        torch.testing.assert_close(
            gradient, other[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_next_token_loss_adds_the_balance_loss_of_a_document_per_label() -> None:
    model, batch = small_model(**EXPERTS), batch_of()
    sums = NextToken().loss(model, batch)
    out = model(**batch.inputs)
    expected_aux = sum(
        aux * int((labels != -100).sum()) for aux, labels in zip(out.aux_loss, batch.labels, strict=True)
    )
    assert sums["aux_loss"].item() == pytest.approx(expected_aux.item(), rel=1e-5) and expected_aux > 1
    assert sums["loss"].item() == pytest.approx(out.nll.sum().item() + expected_aux.item(), rel=1e-5)
    assert_equal(gradients(sums["loss"], model), gradients(out.nll.sum() + expected_aux, model))


@pytest.mark.parametrize("targets", [None, ["lm_head"]])
def test_next_token_loss_has_label_smoothing_and_z_loss(targets: list[str] | None) -> None:
    model, batch = small_model(tie_word_embeddings=False).train(), batch_of()
    if targets:
        randomize(add_lora(model, lora_config(targets=targets)) or model, 0.1)
    logits = model(**batch.inputs_without_labels).logits
    smoothed = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum", label_smoothing=0.2)
    z = logits.logsumexp(-1).square()[batch.labels != -100].sum()
    model.use_penalties(0.2, 0.03)
    loss = NextToken().loss(model, batch)["loss"]
    torch.testing.assert_close(loss, smoothed + 0.03 * z)
    assert_equal(gradients(loss, model), gradients(smoothed + 0.03 * z, model))


@pytest.mark.parametrize("is_packed", [False, True])
def test_next_token_noise_is_bounded_by_the_length_of_each_document(is_packed: bool) -> None:
    """The sum of the noise over a document is that of L D uniform numbers in [-a, a], a = alpha / sqrt(L D)."""
    rows = RandomRows(LENGTHS, 1, vocab_size=40)
    each = [rows[i] for i in range(len(rows))]
    batch = collate([each] if is_packed else [[row] for row in each], pad_id=0, packed=is_packed)
    model = small_model().train()
    embedded: list[Tensor] = []
    model.dropout.register_forward_pre_hook(lambda _, inputs: embedded.append(inputs[0]))
    objective = NextToken(model.input_layer, neftune_alpha=5.0)
    objective.loss(model, batch)
    noise = (embedded[0] - model.input_layer(batch.input_ids)).abs().amax(-1)  # (R, T)
    for document, length in enumerate(batch.lengths.tolist()):
        of_document = noise[document, :length] if batch.document_ids is None else noise[batch.document_ids == document]
        bound = 5 / math.sqrt(length * model.cfg.hidden_size)
        assert 0.9 * bound < of_document.max() <= bound * (1 + 1e-4)
    objective.loss(model.eval(), batch)
    assert torch.equal(embedded[1], model.input_layer(batch.input_ids))


def test_dpo_loss_adds_half_the_balance_loss_of_the_two_sequences_of_a_pair() -> None:
    model, batch = small_model(**EXPERTS), batch_of(sequences_per_row=2)
    objective = Dpo(0.3, Reference.of(small_model(seed=1, **EXPERTS), None))
    sums = objective.loss(model, batch)
    expected_aux = model(**batch.inputs).aux_loss.sum() / 2
    model.cfg = dataclasses.replace(model.cfg, router_aux_loss_coef=0.0)
    without = objective.loss(model, batch)["loss"]
    assert sums["aux_loss"].item() == pytest.approx(expected_aux.item(), rel=1e-5) and expected_aux > 1
    assert sums["loss"].item() == pytest.approx(without.item() + expected_aux.item(), rel=1e-5)
    assert_equal(gradients(sums["loss"], model), gradients(without + expected_aux, model))


def test_balance_loss_is_proportional_to_its_coefficient() -> None:
    model, batch = small_model(**EXPERTS), batch_of()
    before = model(**batch.inputs).aux_loss
    model.cfg = dataclasses.replace(model.cfg, router_aux_loss_coef=2.0)
    torch.testing.assert_close(model(**batch.inputs).aux_loss, 4 * before)


def test_reference_is_the_initial_model_without_dropout() -> None:
    model, batch = small_model(dropout=0.5), batch_of()
    expected = model(**batch.inputs).nll
    reference = Reference.of(model.train(), None)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    assert torch.equal(reference.model(**batch.inputs).nll, expected) and not any(
        p.requires_grad for p in reference.model.parameters()
    )


def test_reference_under_lora_is_the_base_model() -> None:
    model, batch = small_model(dropout=0.5), batch_of()
    expected = model(**batch.inputs).nll
    lora = lora_config(rank=4, alpha=8.0, dropout=0.5, targets=["q_proj", "down_proj"])
    add_lora(model.train(), lora)
    reference = Reference.of(model, lora)
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.3)
    with reference.entered():
        assert torch.equal(reference.model(**batch.inputs).nll, expected)


@pytest.mark.parametrize("sequences_per_row", [1, 2])
def test_dummy_batch_adds_nothing_to_any_sum(sequences_per_row: int) -> None:
    model, batch = small_model(**EXPERTS), batch_of(sequences_per_row)
    objective: Objective = (
        NextToken() if sequences_per_row == 1 else Dpo(0.3, Reference(small_model(seed=1, **EXPERTS)))
    )
    sums = mask_dummy_batch(batch.as_dummy(), objective.loss(model, batch.as_dummy()))
    assert sums["loss"].requires_grad and {name: value.item() for name, value in sums.items()} == dict.fromkeys(
        sums, 0.0
    )
    assert mask_dummy_batch(batch, kept := objective.loss(model, batch)) is kept
    assert objective.count(batch.as_dummy()) == 0 and batch.as_dummy().num_tokens == 0


def test_next_token_counts_labels_and_reports_natural_logarithms() -> None:
    batch = batch_of()
    assert NextToken().count(batch) == int((batch.labels != -100).sum())
    assert NextToken().eval_metrics({"loss": 2.0})["perplexity"] == pytest.approx(math.e**2)
    assert NextToken().uniform_loss(40) == pytest.approx(math.log(40))


def test_evaluation_loss_is_the_mean_nll_without_the_balance_loss(make_run) -> None:
    state = make_run("sft", *MOE, "data.val_fraction=0.5", "train.batch_size=3")
    nll, count = 0.0, 0
    with torch.no_grad():
        for batches in state.val_loaders[""].iter_epoch(0):
            for batch in batches:
                log_p = state.model.eval()(batch.input_ids, lengths=batch.lengths).logits.log_softmax(-1)
                labelled = batch.labels != -100
                nll -= log_p.gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[labelled].sum().item()
                count += int(labelled.sum())
    means = evaluate_loss(state)
    assert means["loss"] == pytest.approx(nll / count, rel=1e-5)
    assert means["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-4)


def test_noise_is_refused_for_a_family_that_names_no_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Decoder, "input_layer")
    with pytest.raises(UserError, match="Decoder names no layer of embeddings"):
        NextToken(small_model().input_layer, neftune_alpha=5.0)
