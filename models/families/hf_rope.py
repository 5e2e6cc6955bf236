"""Rotary position embeddings in a config.json, of transformers 4 and 5."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.errors import UserError
from models.config import UnsupportedVariantError

Settings = dict[str, Any]

# Fields of rotary position embeddings by rope_type
SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
FIX = "choose a model of a supported family: docs/reference/models.md"


def read_rope(given: dict[str, Any], default_theta: float, max_positions: int, family: str, path: Path) -> Settings:
    """Return rope_theta and rope_scaling (a dict, or None) from `rope_parameters` of transformers 5, or `rope_scaling`
    and `rope_theta` of 4.
    """
    results: list[Settings] = []
    for section in ("rope_scaling", "rope_parameters"):
        if given.get(section) or (section == "rope_parameters" and not results):
            rope = {name: value for name, value in (given.get(section) or {}).items() if value is not None}
            for name in ("rope_theta", "partial_rotary_factor"):
                if rope.setdefault(name, given.get(name)) != given.get(name, rope[name]):
                    raise UserError(
                        f"{name} is given twice, as {given[name]} and, in {section}, {rope[name]}",
                        path,
                        "remove the wrong one",
                    )
            results.append(_resolve_rope(rope, default_theta, max_positions, family, path))
    if results[0] != results[-1]:
        raise UserError(
            f"rope_scaling and rope_parameters contradict each other: {results[0]} and {results[-1]}",
            path,
            "remove the wrong one",
        )
    return results[0]


def _resolve_rope(rope: dict[str, Any], default_theta: float, max_positions: int, family: str, path: Path) -> Settings:
    kind = str(rope.pop("type", "default"))
    kind = str(rope.pop("rope_type", kind))
    theta, share = rope.pop("rope_theta") or default_theta, rope.pop("partial_rotary_factor")
    scaling = {name: rope.pop(name) for name in SCALING_FIELDS.get(kind, ()) if name in rope}
    if kind == "yarn":
        mscale, mscale_all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if rope.get("truncate"):
            del rope["truncate"]
    if kind not in SCALING_FIELDS or rope:
        details = f"{list_fields({'rope_type': kind, **rope})} for rotary position embeddings"
        raise UnsupportedVariantError(
            f"{family} with {details} is not supported",
            path,
            f"{FIX}; supported rope_type: {', '.join(SCALING_FIELDS)}",
        )
    if share not in (None, 1):
        raise UnsupportedVariantError(
            f"{family} with partial_rotary_factor={share} is not supported, only 1", path, FIX
        )
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind in ("yarn", "llama3"):
        scaling.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        scaling.setdefault("attention_factor", _yarn_attention_factor(scaling["factor"], mscale, mscale_all_dim))
        scaling |= {"beta_fast": scaling.get("beta_fast") or 32.0, "beta_slow": scaling.get("beta_slow") or 1.0}
    if missing := [name for name in SCALING_FIELDS[kind] if name not in scaling]:
        raise KeyError(", ".join(missing))
    return {"rope_theta": float(theta), "rope_scaling": {"type": kind, **scaling}}


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor on cos and sin that transformers derives (https://arxiv.org/abs/2309.00071, equation 22)."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def list_fields(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={str(value)[:60]}" for name, value in fields.items())
