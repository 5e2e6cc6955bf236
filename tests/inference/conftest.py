"""`write_model`: a small random model with the shipped tokenizer as a Hugging Face folder; `hf_folder`: one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.families.decoder import DecoderConfig
from models.formats.save import save_model
from models.language_model import create_model

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


def small_config() -> DecoderConfig:
    return DecoderConfig(
        family="decoder",
        name="small",
        vocab_size=6400,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
        rope_theta=1e6,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        qk_norm=True,
        tie_word_embeddings=True,
        dropout=0.0,
        attention="auto",
        num_experts=0,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
    )


def write(folder: Path, seed: int, std: float = 0.02, **changes: Any) -> Path:
    """`std`: of the weights; with a large one the probabilities are far from uniform.

    `changes`: of `small_config`.
    """
    torch.manual_seed(seed)
    model = create_model(dataclasses.replace(small_config(), **changes))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    save_model(folder, model, model.cfg, TOKENIZER)
    return folder


@pytest.fixture(scope="session")
def write_model() -> Callable[..., Path]:
    return write


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("trained") / "hf", seed=0)
