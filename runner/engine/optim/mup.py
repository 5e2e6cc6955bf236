"""Learning rates of a narrow decoder for a wide one: the maximal update parametrisation muP
(https://arxiv.org/abs/2203.03466, table 8) with independent weight decay (https://arxiv.org/abs/2510.19093).

With g = model.hidden_size / optimizer.mup_base_width, and heads and MLP widths that grow alike:

| weights | initial std | lr with AdamW | lr of Muon's matrices |
|---|---|---|---|
| hidden matrices | g^-1/2 | g^-1 | g^-1/2: its update has a spectral norm of sqrt(g), that of a weight is constant |
| output: head or, where it is tied, the gain of the last norm; router | g^-1 | g^-1 | g^-1 |
| embedding, other gains, biases | 1 | 1 | 1 |

Weight decay is divided by the factor of the lr, so that lr * weight_decay is the same at every width. Only initial
weights and factors of parameter groups change: the model and its exports are those of a decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.engine.optim.config import OptimizerConfig

if TYPE_CHECKING:
    from torch import nn

# of the decoder, which grow together
WIDTH_KEYS = (
    "model.hidden_size",
    "model.num_attention_heads",
    "model.num_key_value_heads",
    "model.intermediate_size",
    "model.moe_intermediate_size",
)


def width_factors(cfg: OptimizerConfig, model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return (factor of the initial weights, factor of the lr) by parameter name."""
    settings: Any = model.cfg  # a DecoderConfig
    growth: float = settings.hidden_size / cfg.mup_base_width
    output = "model.norm.weight" if settings.tie_word_embeddings else "lm_head.weight"
    hidden = (growth**-0.5, growth ** -(cfg.MUP_POWER or 0))
    return {
        name: (1 / growth, 1 / growth)
        if name == output or name.endswith(".mlp.gate.weight")
        else hidden
        if p.ndim == 2 and ".layers." in name
        else (1.0, 1.0)
        for name, p in model.named_parameters()
    }


def scale_initial_weights(cfg: OptimizerConfig, model: nn.Module) -> None:
    """Multiply new random weights by their factor; at the base width no bit changes."""
    weights = dict(model.named_parameters())
    for name, (factor, _) in width_factors(cfg, model).items():
        weights[name].detach().mul_(factor)


def mup_warnings(cfg: OptimizerConfig, init_from: str) -> list[str]:
    """Return a line for a run that trains given weights on."""
    if init_from == "scratch":
        return []
    return [
        f"optimizer.mup_base_width={cfg.mup_base_width} scales learning rates and weight decay only: the weights of {init_from} stay as they are"
    ]
