"""Rotary position embeddings. Shapes: B rows, T tokens, H head width."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.families.decoder import DecoderConfig, RopeScaling


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + H/2) of queries or keys (https://arxiv.org/abs/2104.09864). x: (B, heads, T, H)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rope_frequencies(cfg: DecoderConfig) -> tuple[Tensor, float]:
    """Return the frequency of each channel pair, (H/2,) in radians per position, and the factor on cos and sin."""
    exponents = torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim
    frequencies = 1.0 / cfg.rope_theta**exponents
    if cfg.rope_scaling is None:
        return frequencies, 1.0
    return _yarn_frequencies(frequencies, cfg, cfg.rope_scaling)


def _yarn_frequencies(frequencies: Tensor, cfg: DecoderConfig, scaling: RopeScaling) -> tuple[Tensor, float]:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): keep high frequencies, divide low ones by `factor`, interpolate between."""

    def channel(rotations: float) -> float:
        """Return the (fractional) index of the channel pair that makes this many rotations over the trained length."""
        return cfg.head_dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = max(math.floor(channel(scaling.beta_fast)), 0), min(math.ceil(channel(scaling.beta_slow)), cfg.head_dim - 1)
    ramp = ((torch.arange(cfg.head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / scaling.factor * ramp, scaling.attention_factor
