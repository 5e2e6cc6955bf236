"""Packing changes which tokens lie side by side and nothing else: the same loss, the same gradients, for every objective."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_fixtures import RandomRows
from tiny_models import BEST_TWO, config

from data.batching.batch import Batch, collate
from data.batching.packing import best_fit_plan
from models.config import LoraConfig
from models.decoder import Decoder
from models.layers.attention import attention, document_mask
from runner.engine.objectives.objective import Objective
from runner.engine.objectives.stage import StageConfig, build_objective

CAPACITY = 96
STAGES = {"pretrain": ("text", "next_token"), "dpo": ("preference", "dpo"), "dpo_lora": ("preference", "dpo")}


def objective_of(stage: str, model: Decoder) -> Objective:
    rows, objective = STAGES[stage]
    lora = LoraConfig(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "v_proj"]) if stage == "dpo_lora" else None
    made = build_objective(StageConfig(name=stage, rows=rows, objective=objective, beta=0.5, lora=lora, after=None, prompts=[]), model)
    with torch.no_grad():  # away from the reference, where the loss is flat
        for p in model.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return made


def batches_of(rows: RandomRows) -> tuple[Batch, Batch]:
    packed = [[rows[i] for i in window] for window in best_fit_plan(rows.sizes, CAPACITY)]
    return collate([[rows[i]] for i in range(len(rows))], pad_id=0, packed=False), collate(packed, pad_id=0, packed=True)


def learned(objective: Objective, model: Decoder, batch: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad()
    sums = objective.loss(model, batch)
    count = objective.count(batch)
    (sums["loss"] / count).backward()
    return {name: value.item() / count for name, value in sums.items()}, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("experts", [{}, BEST_TWO], ids=["dense", "moe"])
@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(2, CAPACITY), min_size=1, max_size=14))
def test_packed_rows_have_the_loss_and_the_gradients_of_rows_of_their_own(stage, experts, lengths):
    torch.manual_seed(0)
    model = Decoder(config(vocab_size=300, num_hidden_layers=1, **experts))
    objective = objective_of(stage, model)
    apart, together = batches_of(RandomRows(lengths, sequences_per_row=1 if stage == "pretrain" else 2, vocab_size=300))
    (losses, gradients), (packed_losses, packed_gradients) = learned(objective, model, apart), learned(objective, model, together)
    assert packed_losses == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert gradients.keys() == packed_gradients.keys() and gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[name], gradient, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_without_confinement_the_loss_would_differ():
    """The test above can fail: attention across rows moves the loss far beyond its tolerance."""
    torch.manual_seed(0)
    model = Decoder(config(vocab_size=300, num_hidden_layers=1))
    objective = objective_of("pretrain", model)
    apart, together = batches_of(RandomRows([20, 30, 40], vocab_size=300))
    leaking = Batch(together.input_ids, together.labels, together.lengths, together.names, torch.zeros_like(together.document_ids), together.position_ids)
    assert abs(objective.loss(model, leaking)["loss"].item() - objective.loss(model, apart)["loss"].item()) > 0.01


@pytest.mark.parametrize("T", [8, 128, 136, 300])
def test_queries_in_blocks_see_what_the_whole_mask_shows(T):
    torch.manual_seed(0)
    document_ids = torch.cat([torch.full((2, T // 3), 0), torch.full((2, T - T // 3 - T // 8), 1), torch.full((2, T // 8), -1)], dim=1)
    q, k, v = torch.randn(2, 4, T, 16), torch.randn(2, 2, T, 16), torch.randn(2, 2, T, 16)
    mask = document_mask(document_ids, dropout=0.0)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, mask, 0.0, "auto"), whole, rtol=0, atol=1e-6)


def test_the_mask_for_the_gpu_lets_through_what_the_mask_for_the_cpu_does():
    from torch.nn.attention.flex_attention import create_mask

    from models.layers.attention import document_mask_mod

    document_ids = torch.tensor([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 3, 3]])
    assert torch.equal(create_mask(document_mask_mod(document_ids), 2, None, 6, 6, device="cpu"), document_mask(document_ids, 0.0))
