"""Packing gives the same loss and gradients as one example per batch row, for every objective."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_fixtures import RandomRows
from tiny_models import TOP_TWO, config, lora_config
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers_families import random_family

from common.errors import UserError
from data.batching.batch import Batch, collate
from data.batching.packing import best_fit_plan
from models.decoder import Decoder
from models.language_model import LanguageModel
from models.layers.attention import attention, document_blocks, document_mask, document_mask_mod, fits_flex_attention
from runner.engine.objectives.config import NextTokenConfig, StageConfig, prepare_stage
from runner.engine.objectives.dpo import DpoConfig
from runner.engine.objectives.objective import Objective

CAPACITY = 96
LORA = lora_config(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "v_proj"])
DPO_VALUES: dict[str, Any] = {"beta": 0.5, "loss_type": "sigmoid", "label_smoothing": 0.0, "nll_coef": 0.5}
STAGES: dict[str, StageConfig] = {
    "pretrain": NextTokenConfig("pretrain", "text", "next_token", None, None),
    "dpo": DpoConfig("dpo", "preference", "dpo", None, None, **DPO_VALUES),
    "dpo_lora": DpoConfig("dpo_lora", "preference", "dpo", LORA, None, **DPO_VALUES),
}


def prepared(stage: str, model: Decoder) -> Objective:
    objective = prepare_stage(STAGES[stage], model)
    with torch.no_grad():  # at the reference, the DPO loss is constant
        for p in model.parameters():
            if p.requires_grad:
                p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return objective


def unpacked_and_packed(rows: RandomRows, has_one_shape: bool = False) -> tuple[Batch, Batch]:
    """Return the rows as two batches, the second with `has_one_shape` as one of a GPU: padded, also by a row."""
    packed = [[rows[i] for i in sequence] for sequence in best_fit_plan(rows.sizes, CAPACITY)]
    shape = (len(packed) + 1, CAPACITY) if has_one_shape else None
    return (
        collate([[rows[i]] for i in range(len(rows))], pad_id=0, packed=False),
        collate(packed, pad_id=0, packed=True, shape=shape),
    )


def loss_and_gradients(
    objective: Objective, model: Decoder, batch: Batch
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad()
    sums = objective.loss(model, batch)
    count = objective.count(batch)
    (sums["loss"] / count).backward()
    return {name: value.item() / count for name, value in sums.items()}, {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("experts", [{}, TOP_TWO], ids=["dense", "moe"])
@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(2, CAPACITY), min_size=1, max_size=14), has_one_shape=st.booleans())
def test_packed_loss_and_gradients_equal_those_of_unpacked_rows(stage, experts, lengths, has_one_shape):
    torch.manual_seed(0)
    model = Decoder(config(vocab_size=300, num_hidden_layers=1, **experts))
    objective = prepared(stage, model)
    unpacked, packed = unpacked_and_packed(
        RandomRows(lengths, sequences_per_row=1 if stage == "pretrain" else 2, vocab_size=300), has_one_shape
    )
    (losses, gradients), (packed_losses, packed_gradients) = (
        loss_and_gradients(objective, model, unpacked),
        loss_and_gradients(objective, model, packed),
    )
    assert packed_losses == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert gradients.keys() == packed_gradients.keys() and gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            packed_gradients[name], gradient, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_packed_loss_without_the_document_mask_differs():
    """The test above can fail: attention across documents changes the loss far more than its tolerance."""
    torch.manual_seed(0)
    model = Decoder(config(vocab_size=300, num_hidden_layers=1))
    objective = prepared("pretrain", model)
    unpacked, packed = unpacked_and_packed(RandomRows([20, 30, 40], vocab_size=300))
    unmasked = Batch(
        packed.input_ids,
        packed.labels,
        packed.lengths,
        packed.names,
        torch.zeros_like(packed.document_ids),
        packed.position_ids,
    )
    assert abs(objective.loss(model, unmasked)["loss"].item() - objective.loss(model, unpacked)["loss"].item()) > 0.01


@pytest.mark.parametrize("T", [8, 128, 136, 300])
def test_document_mask_in_query_blocks_equals_the_full_mask(T):
    torch.manual_seed(0)
    document_ids = torch.cat(
        [torch.full((2, T // 3), 0), torch.full((2, T - T // 3 - T // 8), 1), torch.full((2, T // 8), -1)], dim=1
    )
    q, k, v = torch.randn(2, 4, T, 16), torch.randn(2, 2, T, 16), torch.randn(2, 2, T, 16)
    mask = document_mask(document_ids, dropout=0.0)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, mask, 0.0, "auto"), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "head_width", "is_compiled", "expected"),
    [
        ((4, 512), 64, True, True),
        ((4, 512), 16, True, False),  # its gradients were wrong on an H100
        ((2, 64), 64, True, False),
        ((4, 128), 64, True, False),  # one block: compiled again, for a program that longer rows do not share
        ((4, 512), 64, False, False),
        ((1, 32768), 64, False, True),  # a mask of 1 GiB
    ],
)
def test_flex_attention_is_used_where_it_is_exact_and_pays(shape, head_width, is_compiled, expected):
    assert fits_flex_attention(shape, 0.0, head_width, is_compiled) == expected
    assert not fits_flex_attention(shape, 0.1, head_width, is_compiled)


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=9), min_size=1, max_size=3))
@pytest.mark.slow
def test_blocks_of_the_gpu_mask_equal_those_of_torch(rows):
    """Documents of these lengths, one row each, padded to the longest."""
    T = max(map(sum, rows))
    ids = [[i for i, length in enumerate(row) for _ in range(length)] + [-1] * (T - sum(row)) for row in rows]
    document_ids = torch.tensor(ids)
    mask_mod = document_mask_mod(document_ids)
    assert torch.equal(create_mask(mask_mod, len(rows), None, T, T, device="cpu"), document_mask(document_ids, 0.0))
    ours, expected = document_blocks(document_ids), create_block_mask(mask_mod, len(rows), None, T, T, device="cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(expected, f"{name}_num_blocks")
        assert torch.equal(getattr(ours, f"{name}_num_blocks"), counts), name
        listed = torch.arange(counts.shape[-1]) < counts.unsqueeze(-1)
        lists = getattr(ours, f"{name}_indices"), getattr(expected, f"{name}_indices")
        assert torch.equal(*(each[listed] for each in lists)), name
        assert lists[0].stride() == lists[1].stride(), name  # gradients of others were wrong, without an error


@pytest.mark.parametrize("family", ["decoder", "transformers"])
def test_packed_batch_without_its_documents_is_refused_by_the_model(family: str) -> None:
    rows = RandomRows([20, 30, 40], vocab_size=300)
    unpacked, packed = unpacked_and_packed(rows)
    assert len(packed.lengths) > len(packed.input_ids)
    model: LanguageModel = Decoder(config(vocab_size=300)) if family == "decoder" else random_family("olmo2")
    model.eval()
    ids, lengths = packed.input_ids, packed.lengths
    incomplete: list[dict[str, Any]] = [
        {"lengths": lengths},
        {"lengths": lengths, "labels": packed.labels},
        {"lengths": lengths, "position_ids": packed.position_ids},
        {"lengths": lengths, "document_ids": packed.document_ids},
    ]
    for arguments in incomplete:
        with pytest.raises(UserError, match="would attend to other documents") as refused:
            model(ids, **arguments)
        assert "model(**batch.inputs_without_labels) for logits" in refused.value.fix
    assert model(ids).logits is not None  # may be one document in a row
    model.has_packed_rows = True
    with pytest.raises(UserError, match="a run with packed rows needs lengths"):
        model(ids)
    model.prepare(is_packed=True)
    with torch.no_grad():
        logits, single = model(**packed.inputs_without_labels).logits, model(**unpacked.inputs_without_labels).logits
    assert logits is not None and single is not None
    for row, length, name in zip(single, unpacked.lengths, unpacked.names, strict=True):
        assert torch.allclose(logits[packed.document_ids == packed.names.index(name)], row[:length], atol=1e-5)
