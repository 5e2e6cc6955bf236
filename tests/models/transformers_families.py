"""Tiny random models of transformers of many families, as folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import TOKENIZER
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.families.transformers import TransformersConfig
from models.language_model import stored_tensors
from models.transformers_adapter.model import TransformersModel

SIZES: dict[str, Any] = {
    "vocab_size": 6400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK_EXPERTS = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class Family(NamedTuple):
    """How a family is expected to be computed."""

    changes: dict[str, Any]  # of SIZES
    own_attention: bool = True
    chunked_loss: bool = True
    packing: str = "positions"  # none: packed rows are refused
    model_type: str | None = None  # None: the name of the row


FAMILIES: dict[str, Family] = {
    "llama_partial_rotary": Family({"partial_rotary_factor": 0.5}, model_type="stablelm"),
    "qwen2_window": Family(
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, model_type="qwen2"
    ),
    "mistral_window": Family({"sliding_window": 8}, model_type="mistral"),
    "qwen3_moe": Family(EXPERTS),
    "mixtral": Family(EXPERTS),
    "olmoe": Family(EXPERTS),
    "granitemoe": Family(EXPERTS | {"logits_scaling": 4.0}, chunked_loss=False),
    "deepseek_v3": Family(
        DEEPSEEK_EXPERTS
        | {"first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4},
        own_attention=False,
    ),
    # sparse attention in rows that are longer than those of the probe
    "glm_moe_dsa": Family(
        DEEPSEEK_EXPERTS
        | {"mlp_layer_types": ["dense", "sparse"], "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
        | {"index_topk": 30, "index_head_dim": 16, "index_n_heads": 16},
        own_attention=False,
    ),
    # a frozen router bias
    "ernie4_5_moe": Family(
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
    ),
    "gpt_oss": Family(EXPERTS | {"sliding_window": 8}, own_attention=False, packing="layer_masks"),
    "gemma": Family({"tie_word_embeddings": True}),
    "gemma2": Family({"sliding_window": 8}, own_attention=False, chunked_loss=False),
    "gemma3_text": Family({"sliding_window": 8}),
    "phi": Family({"num_key_value_heads": 4}, chunked_loss=False),
    "phi3": Family({"sliding_window": 8}),
    "olmo2": Family({}),
    "olmo3": Family({"sliding_window": 8}),
    "smollm3": Family({}),
    "granite": Family({"logits_scaling": 4.0, "attention_multiplier": 0.2}, chunked_loss=False),
    "glm4": Family({}),
    "cohere2": Family({"sliding_window": 8}, chunked_loss=False),
    "exaone4": Family({"sliding_window": 8}),
    "starcoder2": Family({"sliding_window": 8}),
    "gpt_neox": Family({}),
    # more embeddings than tokens
    "pythia": Family({"rotary_pct": 0.25, "use_parallel_residual": True, "vocab_size": 6528}, model_type="gpt_neox"),
    "gpt2": Family(GPT),
    "opt": Family({"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, packing="mask"),  # language: allow word
    "lfm2": Family({"full_attn_idxs": [1]}, packing="none"),
    "qwen3_next": Family(
        EXPERTS | {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}, packing="none"
    ),
    "mamba2": Family({"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16}, packing="none"),
    "blenderbot": Family(
        {
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "encoder_layers": 2,
            "dropout": 0.0,
            "scale_embedding": True,
            "forced_eos_token_id": None,
        },
        packing="none",
    ),
    "bloom": Family({"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}, packing="none"),
}


def randomize_frozen(model: nn.Module) -> None:
    """Set the buffers and frozen parameters of a folder to values that no class starts with."""
    for tensor in stored_tensors(model).values():
        if not tensor.requires_grad and tensor.is_floating_point():
            tensor.detach().normal_(std=0.2)


def random_family(model_type: str, **changes: Any) -> TransformersModel:
    """Return a random model of any family, without a folder. `changes`: of SIZES."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES | {"attention_dropout": 0.0} | changes).to_dict()
    return TransformersModel(TransformersConfig.from_hf_config(config, Path("config.json")))


def write_family(folder: Path, name: str, **changes: Any) -> None:
    """Write a random model of the family, with the tokenizer of the samples.

    `changes`: further ones of its config. A name without an entry is a model_type.
    """
    family = FAMILIES.get(name, Family({}))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family.model_type or name, **SIZES | {"attention_dropout": 0.0} | family.changes | changes
    )
    model = AutoModelForCausalLM.from_config(config)
    randomize_frozen(model)
    model.save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        shutil.copy(file, folder)
