"""Dropout applies in training wherever it is used: with only one module active, two forward passes differ."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import packed, random_model, tokens
from torch import Tensor

IDS = tokens(2, 40)


def logits(module: str) -> tuple[Tensor, Tensor]:
    """Return the logits of two forward passes in training mode, with dropout of `module` only."""
    model = random_model().train()
    for layer in model.layers:
        layer.self_attn.cfg = dataclasses.replace(
            model.cfg, dropout=0.5 if "attention probabilities" in module else 0.0
        )
        layer.dropout.p = 0.5 if module in ("attention output", "mlp output") else 0.0
        if module.endswith("output"):  # one module drops both outputs: remove the other one
            torch.nn.init.zeros_(
                (layer.mlp.down_proj if module == "attention output" else layer.self_attn.o_proj).weight
            )
    model.dropout.p = 0.5 if module == "embedding" else 0.0
    model.cfg = dataclasses.replace(model.cfg, dropout=0.5)  # so that the mask is one that dropout can use
    inputs = packed(2, 40) if "packed" in module else {}
    return model(IDS, **inputs).logits, model(IDS, **inputs).logits


@pytest.mark.parametrize(
    "module",
    ["embedding", "attention probabilities", "attention probabilities, packed", "attention output", "mlp output"],
)
def test_dropout_changes_the_output_of_each_module(module: str) -> None:
    first, second = logits(module)
    assert not torch.equal(first, second)


def test_dropout_nowhere_leaves_the_output_as_it_is() -> None:
    """The test above can fail."""
    assert torch.equal(*logits("nowhere"))
