"""DPO objective: losses and logged numbers against the formulas of the papers, computed without batches from the logits
of each sequence.
"""

import dataclasses
import math

import pytest
import torch
from row_fixtures import RandomRows
from tiny_models import TOP_TWO, config

from common.errors import UserError
from data.batching.batch import IGNORE_INDEX, Batch, collate
from models.decoder import Decoder
from runner.engine.objectives.dpo import Dpo, DpoConfig
from runner.engine.objectives.objective import Reference

BETA, VOCABULARY = 0.4, 40
LENGTHS = [3, 17, 9, 30, 12]


def models(**changes: object) -> tuple[Decoder, Decoder]:
    """(trained model, reference), different enough that no term is near zero."""
    torch.manual_seed(0)
    pair = [Decoder(config(vocab_size=VOCABULARY, num_hidden_layers=1, **changes)) for _ in range(2)]
    for model in pair:
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.3)
    return pair[0], pair[1]


def batches() -> list[Batch]:
    rows = RandomRows(LENGTHS, sequences_per_row=2, vocab_size=VOCABULARY)
    packed = [[rows[i] for i in sequence] for sequence in ([3, 0], [1, 4, 2])]
    return [
        collate([[rows[i]] for i in range(len(rows))], pad_id=0, packed=False),
        collate(packed, pad_id=0, packed=True),
    ]


@torch.no_grad()
def token_log_probs(model: Decoder, batch: Batch) -> list[list[float]]:
    """log p of each token with a label, per sequence of an unpacked batch, each computed alone."""
    sequences = []
    for ids, labels, length in zip(batch.input_ids, batch.labels, batch.lengths.tolist(), strict=True):
        log_p = model(ids[None, :length]).logits[0].double().log_softmax(-1)
        sequences.append(
            [log_p[t, label].item() for t, label in enumerate(labels[:length].tolist()) if label != IGNORE_INDEX]
        )
    return sequences


def expected(
    loss_type: str, smoothing: float, nll_coef: float, model: Decoder, reference: Decoder, batch: Batch
) -> dict[str, float]:
    """Means over pairs in plain Python: equation 7 of arXiv 2305.18290, cDPO's mixture of it, equation 17 of arXiv
    2310.12036.
    """
    ours, reference_log_probs, pairs = (
        token_log_probs(model, batch),
        token_log_probs(reference, batch),
        len(batch.names),
    )
    totals = dict.fromkeys(
        ("loss", "reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl", "nll"), 0.0
    )
    for i in range(pairs):
        chosen, rejected = (
            [a - b for a, b in zip(ours[k], reference_log_probs[k], strict=True)] for k in (i, pairs + i)
        )
        if loss_type == "ipo":
            w, r = sum(chosen) / len(chosen), sum(rejected) / len(rejected)
            loss = (w - r - 1 / (2 * BETA)) ** 2
        else:
            w, r = sum(chosen), sum(rejected)
            loss = (1 - smoothing) * math.log1p(math.exp(-BETA * (w - r))) + smoothing * math.log1p(
                math.exp(BETA * (w - r))
            )
        nll = -sum(ours[i]) / len(ours[i])
        kl = sum(math.exp(-x) - 1 + x for x in chosen)
        numbers = {
            "loss": loss + nll_coef * nll,
            "reward_chosen": BETA * w,
            "reward_rejected": BETA * r,
            "reward_margin": BETA * (w - r),
            "kl": kl,
            "nll": nll,
        }
        numbers["reward_accuracy"] = float(w > r)
        totals = {name: total + numbers[name] / pairs for name, total in totals.items()}
    if not nll_coef:
        del totals["nll"]
    return totals


@pytest.mark.parametrize(
    "loss_type, smoothing, nll_coef",
    [("sigmoid", 0.0, 0.0), ("sigmoid", 0.1, 0.0), ("sigmoid", 0.0, 0.2), ("ipo", 0.0, 0.0), ("ipo", 0.0, 0.5)],
)
def test_dpo_loss_and_logged_numbers_are_those_of_the_papers(loss_type, smoothing, nll_coef):
    model, reference = models()
    unpacked, packed = batches()
    objective = Dpo(BETA, Reference(reference), loss_type, smoothing, nll_coef)
    numbers = expected(loss_type, smoothing, nll_coef, model, reference, unpacked)
    for batch in (unpacked, packed):
        sums = objective.loss(model, batch)
        assert {name: value.item() / objective.count(batch) for name, value in sums.items()} == pytest.approx(
            numbers, rel=1e-4, abs=1e-5
        )
        assert sums["loss"].requires_grad and not any(
            value.requires_grad for name, value in sums.items() if name != "loss"
        )


def test_dpo_adds_and_differentiates_the_balance_loss_of_both_answers():
    model, reference = models(**TOP_TWO)
    batch = batches()[0]
    sums = Dpo(BETA, Reference(reference)).loss(model, batch)
    without = Dpo(BETA, Reference(reference)).loss(lambda **inputs: model(**inputs)._replace(aux_loss=None), batch)
    aux = model(**batch.inputs).aux_loss.mean() * len(LENGTHS)  # of both answers of a pair
    assert sums["aux_loss"].item() == pytest.approx(aux.item(), rel=1e-5) and "aux_loss" not in without
    assert sums["loss"].item() == pytest.approx((without["loss"] + aux).item(), rel=1e-5)
    router = next(p for name, p in model.named_parameters() if "mlp.gate.weight" in name)
    of_all, of_pairs, of_aux = (
        torch.autograd.grad(loss, router, retain_graph=True)[0] for loss in (sums["loss"], without["loss"], aux)
    )
    torch.testing.assert_close(of_all, of_pairs + of_aux)
    assert of_aux.abs().max() > 1e-4


@pytest.mark.parametrize("loss_type, start", [("sigmoid", math.log(2)), ("ipo", 1 / (2 * BETA) ** 2)])
def test_dpo_at_its_reference_has_no_margin_and_no_kl(loss_type, start):
    model, _ = models()
    batch = batches()[0]
    means = {
        name: value.item() / len(LENGTHS)
        for name, value in Dpo(BETA, Reference(model), loss_type).loss(model, batch).items()
    }
    assert means == pytest.approx(
        {
            "loss": start,
            **dict.fromkeys(("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "kl"), 0.0),
        },
        abs=1e-6,
    )


@pytest.mark.slow
def test_dpo_kl_is_the_exact_one_in_expectation_over_the_model():
    """All answers of one token, weighted with the model's probabilities: the estimate becomes KL(model || reference)."""
    model, reference = models()
    prompt = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        log_p, log_q = (m(prompt).logits[0, -1].double().log_softmax(-1) for m in (model, reference))
    total = 0.0
    for token in range(VOCABULARY):
        labels = torch.tensor([[IGNORE_INDEX, IGNORE_INDEX, label] for label in (token, 0)])
        batch = Batch(prompt.repeat(2, 1), labels, torch.tensor([3, 3]), ["pair"])
        total += log_p[token].exp().item() * Dpo(BETA, Reference(reference)).loss(model, batch)["kl"].item()
    assert total == pytest.approx((log_p.exp() * (log_p - log_q)).sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    "changes, setting",
    [
        ({"loss_type": "hinge"}, "stage.loss_type=hinge"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "stage.label_smoothing=0.1"),
        ({"label_smoothing": 0.5}, "stage.label_smoothing=0.5"),
        ({"label_smoothing": -0.1}, "stage.label_smoothing=-0.1"),
        ({"nll_coef": -1.0}, "stage.nll_coef=-1.0"),
        ({"beta": 0.0}, "stage.beta=0.0"),
    ],
)
def test_dpo_refuses_options_that_have_no_meaning(changes, setting):
    stage = DpoConfig(
        "dpo", "preference", "dpo", None, None, beta=0.1, loss_type="sigmoid", label_smoothing=0.0, nll_coef=0.0
    )
    with pytest.raises(UserError) as error:
        dataclasses.replace(stage, **changes)
    assert error.value.setting == setting and error.value.fix
