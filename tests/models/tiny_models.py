"""Small random models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.config import LoraConfig, ModelConfig
from models.decoder import Decoder
from models.families.decoder import DecoderConfig, RopeScaling

TOKENIZER = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"
V = 6400
DENSE = DecoderConfig(
    family="decoder",
    name="dense",
    vocab_size=V,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position_embeddings=256,
    rope_theta=1e6,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    dropout=0.0,
    attention="auto",
    num_experts=0,
    num_experts_per_tok=1,
    moe_intermediate_size=0,
    norm_topk_prob=False,
    router_aux_loss_coef=0.0,
)
LLAMA: dict[str, Any] = {"qk_norm": False, "tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 40, "router_aux_loss_coef": 1e-2}
TOP_TWO: dict[str, Any] = EXPERTS | {"num_experts_per_tok": 2, "norm_topk_prob": True}
YARN: dict[str, Any] = {
    "rope_scaling": RopeScaling(
        factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0
    )
}


def lora_config(
    rank: int = 4, alpha: float = 8.0, dropout: float = 0.0, targets: list[str] | None = None, **changes: Any
) -> LoraConfig:
    plain = {"rslora": False, "dora": False, "quantize": None, "continue_adapter": False}
    return LoraConfig(rank, alpha, dropout, ["q_proj", "down_proj"] if targets is None else targets, **plain | changes)


def config(**changes: Any) -> DecoderConfig:
    return dataclasses.replace(DENSE, **changes)


def randomize(model: nn.Module, std: float) -> None:
    """Set weights so large that every part of the model affects its output, and norm weights that are not 1."""
    for p in model.parameters():
        nn.init.normal_(p, mean=0.0 if p.ndim > 1 else 1.0, std=std)


def random_model(seed: int = 0, std: float = 0.2, **changes: Any) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder(config(**changes))
    randomize(model, std)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, V, shape, generator=torch.Generator().manual_seed(seed))


def packed(B: int, T: int) -> dict[str, Tensor]:
    """Inputs of B packed rows with a document every 20 tokens."""
    positions = torch.arange(T).expand(B, T)
    return {"document_ids": positions // 20, "position_ids": positions % 20}


class Gpt9(Decoder):
    """Model of the family in test_families.py."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(config(vocab_size=cfg.vocab_size))


def max_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
