"""The load-balancing loss of experts in models of transformers is `load_balancing_loss_func` of each document, or the
log says that there is none.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers_families import write_family

from common.errors import UserError
from models.formats.json_files import read_model_config
from models.formats.load import load_into, load_weights
from models.language_model import create_model

LENGTHS, PADDING, COEFFICIENT = (23, 5, 40), 4, 0.05
EXPERTS = ("qwen3_moe", "olmoe", "granitemoe", "qwen3_next")

families = pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERTS)]
)


def model_of(folder: Path, is_packed: bool = True, family: str = "transformers", **changes: Any) -> Any:
    cfg = dataclasses.replace(read_model_config(folder, family), **changes)
    model = create_model(cfg)
    load_into(model, load_weights(folder, family), str(folder))
    model.kernels_description = model.prepare(is_packed)
    return model.train()


def rows_of_documents() -> list[Tensor]:
    return list(torch.randint(3, 6400, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1)).split(LENGTHS))


def expected_losses(folder: Path, rows: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses of the documents (S,) as transformers computes them one by one, and the gradients of their sum."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    function = importlib.import_module(type(hf).__module__).load_balancing_loss_func
    top_k, experts, losses = hf.config.num_experts_per_tok, 4, []
    for row in rows:
        out = hf(row[None], use_cache=False, output_router_logits=True)
        losses.append(function(out.router_logits, experts, top_k))
        torch.testing.assert_close(losses[-1], out.aux_loss)
    (COEFFICIENT * torch.stack(losses).sum()).backward()
    return COEFFICIENT * torch.stack(losses).detach(), {
        name: p.grad for name, p in hf.named_parameters() if p.grad is not None
    }


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "labels": ids.clone(), "lengths": torch.tensor([len(row) for row in rows])}


def packed(rows: list[Tensor]) -> dict[str, Tensor]:
    pad = torch.zeros(PADDING, dtype=torch.long)
    ids = torch.cat([*rows, pad])[None]
    documents = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)] + [pad - 1])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows] + [pad])[None]
    lengths = torch.tensor([len(row) for row in rows])
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "lengths": lengths,
        "document_ids": documents,
        "position_ids": positions,
    }


@pytest.mark.slow
@families
def test_balance_loss_of_each_document_equals_transformers_without_padding(name: str, tmp_path: Path) -> None:
    write_family(tmp_path, name)
    rows = rows_of_documents()
    expected, gradients = expected_losses(tmp_path, rows)
    can_pack = name != "qwen3_next"
    for batch in (padded(rows), packed(rows)) if can_pack else (padded(rows),):
        model = model_of(tmp_path, can_pack, router_aux_loss_coef=COEFFICIENT)
        assert "load-balancing loss times 0.05" in str(model.kernels_description)
        out = model(**batch)
        torch.testing.assert_close(out.aux_loss, expected, rtol=1e-5, atol=1e-8)
        out.aux_loss.sum().backward()
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert found.keys() == {key for key, gradient in gradients.items() if gradient.any()}
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-3, atol=1e-7)


@pytest.mark.slow
def test_balance_loss_of_micro_batches_equals_one_batch_also_recomputed(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    rows, gradients = rows_of_documents(), []
    for mode, batches in (("none", [packed(rows)]), ("full", [packed(rows[:1]), packed(rows[1:])])):
        model = model_of(tmp_path, router_aux_loss_coef=COEFFICIENT)
        model.activation_checkpointing = mode
        for batch in batches:
            model(**batch, reduction="sum").aux_loss.sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
        assert model.balance.recorded is None
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3_moe", "decoder"),
        ("mixtral", "transformers"),
        *(pytest.param(name, "transformers", marks=pytest.mark.slow) for name in ("gpt_oss", "olmoe")),
    ],
)
def test_balance_loss_is_added_if_transformers_adds_it(name: str, family: str, tmp_path: Path) -> None:
    row = rows_of_documents()[0][None]
    for is_added in (False, True):
        write_family(tmp_path, name, router_aux_loss_coef=0.9, output_router_logits=is_added)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(row, labels=row).loss
        model = model_of(tmp_path, family=family, is_packed=False)
        aux = model(row, lengths=torch.tensor([row.shape[1]])).aux_loss  # of all tokens, as in transformers
        found = model(row[:, :-1], labels=row[:, 1:]).nll.mean() + (aux[0] if aux is not None else 0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert ("output_router_logits=false" in str(model.kernels_description)) == (
            family == "transformers" and not is_added
        )
    cfg = dataclasses.replace(read_model_config(tmp_path, family), router_aux_loss_coef=0.5)
    assert create_model(cfg)(row, lengths=torch.tensor([row.shape[1]])).aux_loss is not None


@pytest.mark.parametrize(("name", "changes", "line"), [
    ("mixtral", {"router_aux_loss_coef": 0.0}, "no load-balancing loss: router_aux_loss_coef is 0"),
    pytest.param("deepseek_v3", {}, "no load-balancing loss: transformers has none for DeepseekV3ForCausalLM", marks=pytest.mark.slow),
])  # fmt: skip
def test_model_of_experts_without_balance_loss_reports_it(
    name: str, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_family(tmp_path, name)
    model = model_of(tmp_path, **changes)
    assert line in str(model.kernels_description) and model(**packed(rows_of_documents())).aux_loss is None


def test_balance_loss_with_another_definition_is_switched_off(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral", output_router_logits=True)
    model: Any = create_model(read_model_config(tmp_path, "transformers"))
    model.balance.top_k = 1
    assert "that of MixtralForCausalLM has another definition" in str(model.prepare(False))


def test_negative_balance_coefficient_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "mixtral")
    with pytest.raises(UserError, match="model.router_aux_loss_coef must be at least 0"):
        dataclasses.replace(read_model_config(tmp_path, "transformers"), router_aux_loss_coef=-1.0)
