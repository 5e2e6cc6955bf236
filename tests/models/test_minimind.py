"""MiniMind's .pth files have its own mathematics, beside an independent implementation of it in this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import max_difference, random_model
from torch import Tensor

from common.errors import UserError
from models.decoder import Decoder
from models.formats.json_files import read_config_of_weights
from models.formats.load import load_into, load_weights

MOE: dict[str, Any] = {
    "num_experts": 4,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 5e-4,
}
IDS = torch.randint(0, 6400, (2, 30), generator=torch.Generator().manual_seed(3))


def minimind_logits(
    state: dict[str, Tensor], ids: Tensor, heads: int, eps: float = 1e-6, renormalize: bool = True
) -> Tensor:
    """Return the logits (B, T, V) of MiniMind 3: one token, head and expert at a time."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * state[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T

    def mlp(x: Tensor, name: str) -> Tensor:
        return linear(F.silu(linear(x, f"{name}.gate_proj")) * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def rotate(x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = position / 1e6 ** (torch.arange(half, dtype=torch.float64) / half)
        a, b = x[..., :half].double(), x[..., half:].double()
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(x.dtype)

    def attention(x: Tensor, name: str) -> Tensor:
        T = len(x)
        q, k, v = (
            linear(x, f"{name}.{part}_proj").view(T, -1, len(linear(x, f"{name}.q_proj")[0]) // heads) for part in "qkv"
        )
        if f"{name}.q_norm.weight" in state:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        q, k = (torch.stack([rotate(y[t], t) for t in range(T)]) for y in (q, k))
        out = torch.zeros_like(q)
        for t in range(T):
            for head in range(heads):
                group = head * k.shape[1] // heads
                weights = (k[: t + 1, group] @ q[t, head] / q.shape[-1] ** 0.5).softmax(0)
                out[t, head] = weights @ v[: t + 1, group]
        return linear(out.reshape(T, -1), f"{name}.o_proj")

    def experts(x: Tensor, name: str) -> Tensor:
        rows = []
        for token in x:
            scores = linear(token, f"{name}.gate").softmax(0)
            best = int(scores.argmax())
            weight = scores[best] / scores[best] if renormalize else scores[best]
            rows.append(weight * mlp(token, f"{name}.experts.{best}"))
        return torch.stack(rows)

    logits = []
    for row in ids:
        x, layer = state["model.embed_tokens.weight"][row], 0
        while f"model.layers.{layer}.input_layernorm.weight" in state:
            name = f"model.layers.{layer}"
            x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            feed_forward = experts if f"{name}.mlp.gate.weight" in state else mlp
            x = x + feed_forward(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
            layer += 1
        logits.append(linear(norm(x, "model.norm"), "lm_head"))
    return torch.stack(logits)


def write_pth(path: Path, **changes: Any) -> dict[str, Tensor]:
    """Write half-precision weights as MiniMind does; return them in fp32."""
    state = {name: p.half() for name, p in random_model(std=0.15, **changes).state_dict().items()}
    torch.save(state, path)
    return {name: p.float() for name, p in state.items()}


@torch.no_grad()
def loaded_logits(path: Path) -> Tensor:
    cfg = read_config_of_weights(path)
    model = Decoder(cfg).eval()
    load_into(model, load_weights(path), str(path))
    return model(IDS).logits


@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
def test_minimind_file_has_the_logits_of_minimind(changes: dict[str, Any], tmp_path: Path) -> None:
    state = write_pth(tmp_path / "full_sft_48.pth", **changes)
    assert max_difference(loaded_logits(tmp_path / "full_sft_48.pth"), minimind_logits(state, IDS, heads=4)) < 1e-5


def test_minimind_moe_counts_the_output_of_its_expert_in_full(tmp_path: Path) -> None:
    state = write_pth(tmp_path / "moe.pth", **MOE)
    assert (
        max_difference(loaded_logits(tmp_path / "moe.pth"), minimind_logits(state, IDS, heads=4, renormalize=False))
        > 0.1
    )


def test_minimind_2_file_without_query_norm_has_its_eight_heads(tmp_path: Path) -> None:
    state = write_pth(tmp_path / "v2.pth", qk_norm=False, num_attention_heads=8, num_key_value_heads=2, head_dim=6)
    cfg = read_config_of_weights(tmp_path / "v2.pth")
    assert (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.rms_norm_eps) == (8, 2, 6, 1e-5)
    assert max_difference(loaded_logits(tmp_path / "v2.pth"), minimind_logits(state, IDS, heads=8, eps=1e-5)) < 1e-5


def test_minimind_config_in_conf_has_the_settings_of_its_files(tmp_path: Path) -> None:
    from runner.config.compose import compose_config

    sizes = [f"model.{name}={value}" for name, value in {"vocab_size": 64, "hidden_size": 16, "head_dim": 4}.items()]
    sizes += ["model.intermediate_size=8", "model.moe_intermediate_size=8"]
    model = compose_config(["model=minimind_moe", "model.norm_topk_prob=true", *sizes]).model
    torch.save(Decoder(model).state_dict(), tmp_path / "moe.pth")
    read = read_config_of_weights(tmp_path / "moe.pth")
    assert read.mathematics() == model.mathematics() and read.router_aux_loss_coef == model.router_aux_loss_coef == 4e-3


def test_pth_file_of_another_model_is_refused(tmp_path: Path) -> None:
    torch.save({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="not the weights of a MiniMind model: 'model.embed_tokens.weight' is missing"):
        read_config_of_weights(tmp_path / "other.pth")
