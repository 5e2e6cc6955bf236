"""Generation with models of transformers: a probe finds whether the cache and batches are exact; answers equal those
without either.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers_families import SIZES

from models.families.transformers import LengthDependence, TransformersConfig
from models.generate import generate
from models.language_model import LanguageModel, create_model
from models.transformers_adapter.model import TransformersModel

GREEDY: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "stop_ids": [],
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 24,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
# name: (fields of the config, has_cache, in_batches)
FAMILIES: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "rwkv": ({"attention_hidden_size": 32, "context_length": 128}, False, False),  # it ignores masks
    "xlstm": ({"num_heads": 4}, False, False),  # it has a cache of its own
    # its cache has another name
    "mamba2": ({"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16}, True, True),
    "phi3": ({"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 24}, True, True),
    "llama": ({"rope_parameters": DYNAMIC_ROPE}, True, True),
    "qwen2": ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, True, True),
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 6400, (length,), generator=generator).tolist() for length in lengths]


def random_model(name: str, changes: dict[str, Any]) -> LanguageModel:
    config = AutoConfig.for_model(name, **SIZES | {"attention_dropout": 0.0} | changes)
    # max_position_embeddings as a user sets it: the default is the length up to which the embeddings do not change.
    cfg = dataclasses.replace(
        TransformersConfig.from_hf_config(config.to_dict(), Path(name)), max_position_embeddings=128
    )
    model = create_model(cfg).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.prepare(is_packed=False)
    return model


@torch.no_grad()
def without_cache(model: LanguageModel, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


@pytest.mark.parametrize(
    "name",
    ["rwkv", "phi3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xlstm", "mamba2", "llama", "qwen2"))],
)
def test_generate_in_a_batch_equals_whole_texts_without_a_cache(name: str) -> None:
    changes, has_cache, in_batches = FAMILIES[name]
    model = random_model(name, changes)
    assert isinstance(model, TransformersModel)
    # shorter and longer than the length of the rotary embeddings, and one that reaches it
    prompts = prompts_of((3, 17, 30, 1))
    assert generate(model, prompts, **GREEDY) == [without_cache(model, prompt, 12) for prompt in prompts]
    assert model._generation() == (has_cache, in_batches)


@pytest.mark.parametrize(("at_each_token", "expected"), [(False, [False, True, False]), (True, [False, True, True])])
def test_length_dependent_rope_invalidates_the_cache_beyond_its_length(
    at_each_token: bool, expected: list[bool]
) -> None:
    dependence = LengthDependence(24, at_each_token)
    assert [dependence.invalidates_cache(before, before + 1) for before in (23, 24, 25)] == expected
