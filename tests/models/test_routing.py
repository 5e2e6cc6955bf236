"""Which family computes a folder of transformers: the decoder where it has every variant, else the class of
transformers. Both have its logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import IDS, ROPES, V, our_logits, reference_logits, write_folder
from tiny_models import max_difference

from common.errors import UserError
from models.formats.json_files import read_model_config, why_transformers
from models.formats.load import load_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], **WINDOW}

# (model_type, changes, part of the reason; None: the decoder computes it)
ROUTES: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, None),
    ("llama", {"rope_parameters": ROPES["llama3"]}, None),
    ("llama", {"rope_parameters": ROPES["yarn_mscale"]}, None),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, None),
    ("llama", {"head_dim": 16}, None),
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type=dynamic"),
    ("llama", {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.5"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("llama", {"rope_parameters": ROPES["yarn"] | {"truncate": False}}, "truncate=False"),
    ("mistral", {"sliding_window": None}, None),
    ("mistral", {"sliding_window": 8}, "sliding_window=8"),
    ("ministral", {"sliding_window": 8}, "sliding_window=8"),
    ("qwen2", {}, None),
    ("qwen2", WINDOW, "sliding_window=8"),
    ("qwen2", MIXED, "sliding_window=8"),
    ("qwen3", {"head_dim": 16, "attention_bias": True}, None),
    ("qwen3", MIXED, "sliding_window=8"),
    ("phi3", {}, None),
    (
        "phi3",
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        "rope_type=longrope",
    ),
    ("phi3", {"rope_parameters": PARTIAL}, "partial_rotary_factor=0.5"),
    ("phi3", {"sliding_window": 8}, "sliding_window=8"),
    ("smollm3", {"no_rope_layers": [1, 1]}, None),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, "no_rope_layers"),
    ("seed_oss", {}, None),
    ("cwm", {"sliding_window": 8, "rope_parameters": ROPES["llama3"]}, "sliding_window=8"),
    ("qwen3_moe", {"norm_topk_prob": True}, None),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, "sliding_window=8"),
    ("mixtral", {}, None),
    ("mixtral", {"sliding_window": 8}, "sliding_window=8"),
    ("stablelm", {"partial_rotary_factor": 0.25}, "model_type stablelm"),
    (
        "granite",
        {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        "model_type granite",
    ),
    ("cohere", {"logit_scale": 0.3}, "model_type cohere"),
    (
        "gemma2",
        {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0, "sliding_window": 8},
        "model_type gemma2",
    ),
    ("olmo", {"clip_qkv": 0.5}, "model_type olmo"),
    ("olmo2", {}, "model_type olmo2"),
    ("gemma3_text", {"sliding_window": 8}, "model_type gemma3_text"),
]


def _id(route: tuple[str, dict[str, Any], str | None]) -> str:
    return "-".join([route[0], *(f"{name}" for name in route[1])])


routes = [
    pytest.param(*route, id=_id(route), marks=[] if i % 9 == 0 else [pytest.mark.slow])
    for i, route in enumerate(ROUTES)
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), routes)
def test_route_of_a_model_has_the_logits_of_transformers_and_its_reason(
    model_type: str, changes: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    write_folder(tmp_path, model_type, **changes)
    reference = reference_logits(tmp_path)
    cfg = read_model_config(tmp_path)
    assert cfg.family == ("decoder" if reason is None else "transformers") and cfg.vocab_size == V
    if reason is not None:
        assert reason in why_transformers(tmp_path)
    assert max_difference(our_logits(tmp_path), reference) < 1e-5
    if reason is None:  # forced
        with torch.no_grad():
            assert max_difference(load_model(tmp_path, "transformers")(IDS).logits, reference) < 1e-5


def test_forced_decoder_refuses_a_variant_that_it_lacks(tmp_path: Path) -> None:
    write_folder(tmp_path, "mistral", sliding_window=8)
    with pytest.raises(UserError, match="sliding_window=8 is not supported"):
        read_model_config(tmp_path, "decoder")


def test_forced_decoder_refuses_a_family_that_it_lacks(tmp_path: Path) -> None:
    write_folder(tmp_path, "olmo2")
    with pytest.raises(UserError, match="model.family=decoder does not compute model_type olmo2"):
        read_model_config(tmp_path, "decoder")


def test_length_of_embeddings_that_depend_on_the_batch_is_the_trained_one(tmp_path: Path) -> None:
    write_folder(
        tmp_path, "phi3", max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=LONGROPE
    )
    assert read_model_config(tmp_path).max_position_embeddings == 64


def test_field_that_transformers_does_not_declare_is_a_warning(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    fields = json.loads((tmp_path / "config.json").read_text())
    assert read_model_config(tmp_path, "transformers").training_warnings() == []
    (tmp_path / "config.json").write_text(json.dumps(fields | {"attention_multiplier": 0.01}))
    cfg = read_model_config(tmp_path)
    assert cfg.family == "transformers" and "attention_multiplier=0.01" in cfg.training_warnings()[0]
