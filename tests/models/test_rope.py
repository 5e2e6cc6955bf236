"""Rotary frequencies and factors against the formulas of each type, pair by pair."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import config

from models.families.decoder import RopeScaling
from models.families.hf_config import read_hf_config
from models.layers.attention_block import rope_frequencies

THETA, HEAD_DIM = 50.0, 16
PLAIN = [THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]  # radians per position
FIELDS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip


def frequencies(scaling: RopeScaling | None) -> tuple[list[float], float]:
    values, factor = rope_frequencies(config(rope_theta=THETA, head_dim=HEAD_DIM, rope_scaling=scaling))
    assert values.dtype == torch.float32
    return values.tolist(), factor


def test_rope_frequencies_without_scaling_are_powers_of_theta() -> None:
    assert frequencies(None) == (pytest.approx(PLAIN), 1.0)


def test_rope_linear_divides_every_frequency() -> None:
    assert frequencies(RopeScaling(type="linear", factor=3.0)) == (pytest.approx([f / 3 for f in PLAIN]), 1.0)


def test_rope_llama3_divides_long_wavelengths_and_interpolates_between() -> None:
    factor, low, high, trained = 8.0, 1.0, 4.0, 64
    kinds, expected = set(), []
    for f in PLAIN:
        wavelength = 2 * math.pi / f
        share = min(max((trained / wavelength - low) / (high - low), 0.0), 1.0)  # of the frequency that is kept
        kinds.add("kept" if wavelength < trained / high else "divided" if wavelength > trained / low else "between")
        expected.append((1 - share) * f / factor + share * f)
    scaling = RopeScaling(
        type="llama3",
        factor=factor,
        original_max_position_embeddings=trained,
        low_freq_factor=low,
        high_freq_factor=high,
    )
    assert frequencies(scaling) == (pytest.approx(expected), 1.0) and kinds == {"kept", "divided", "between"}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.2, "mscale_all_dim": 0.7}, (0.12 * math.log(4) + 1) / (0.07 * math.log(4) + 1)),
    ],
    ids=["derived", "given", "mscale"],
)
def test_rope_yarn_factor_is_that_of_the_folder(given: dict[str, float], expected: float) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": THETA, "original_max_position_embeddings": 16, **given}
    settings = read_hf_config({"model_type": "llama", **FIELDS, "rope_parameters": rope}, Path("config.json"))
    assert settings["rope_theta"] == THETA and settings["rope_scaling"]["attention_factor"] == pytest.approx(expected)


def test_biases_of_a_family_are_read_or_implied() -> None:
    biases = ("attention_bias", "attention_out_bias", "mlp_bias")
    for model_type, expected in (
        ("llama", (False, False, False)),
        ("qwen2", (True, False, False)),
        ("seed_oss", (True, False, False)),
    ):
        settings = read_hf_config({"model_type": model_type, **FIELDS}, Path("config.json"))
        assert tuple(settings[name] for name in biases) == expected, model_type
