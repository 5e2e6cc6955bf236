"""FIXME models.layers.rope."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.config import ModelConfig, RopeScaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves as pairs. x: (B, heads, T, H)"""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_frequencies(cfg: ModelConfig) -> tuple[Tensor, float]:
    """Radians a position for each pair of channels (H / 2,), and the factor on cos and sin."""
    pairs = torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim
    plain = 1.0 / cfg.rope_theta**pairs
    if cfg.rope_scaling is None:
        return plain, 1.0
    return _yarn_frequencies(plain, cfg, cfg.rope_scaling)


def _yarn_frequencies(plain: Tensor, cfg: ModelConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): fast channels stay, slow ones are stretched, a ramp between."""

    def channel(rotations: float) -> float:
        """The channel pair that turns this often over the original length."""
        return cfg.head_dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = max(math.floor(channel(scaling.beta_fast)), 0), min(math.ceil(channel(scaling.beta_slow)), cfg.head_dim - 1)
    ramp = ((torch.arange(cfg.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling.factor * ramp, scaling.attention_factor
