"""Decoder-only transformer of the Llama, Qwen and Mixtral architectures, dense or mixture of experts.

Shapes: B rows, T tokens, S documents (several per row when packed, else one per row), D hidden size, H head width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.families.decoder import DecoderConfig
from models.language_model import LanguageModel, ModelOutput
from models.layers.attention import AttentionMask, additive_mask, document_mask
from models.layers.attention_block import (
    WEIGHT_INIT_STD,
    DecoderLayer,
    KVCache,
    LayerContext,
    RMSNorm,
    rope_frequencies,
)
from models.layers.chunked_loss import LMHead
from models.layers.mlp import MoE, index_documents, load_balancing_loss
from models.layers.ops import CHECKPOINTING, compute_dtype


class DecoderBackbone(nn.Module):
    """All parameters but those of the output layer: a module of its own, for the parameter names `model.layers...`."""

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)


class Decoder(LanguageModel):
    cfg: DecoderConfig
    frequencies: Tensor  # (H/2,) radians per position

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = "none"
        self.model = DecoderBackbone(cfg)
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.dropout = nn.Dropout(cfg.dropout)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=WEIGHT_INIT_STD)
            elif name.endswith(".bias"):
                nn.init.zeros_(p)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        frequencies, self.rope_factor = rope_frequencies(cfg)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def input_layer(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: AttentionMask = None,
        cache: KVCache | None = None,
        reduction: str = "none",
    ) -> ModelOutput:
        T = input_ids.shape[1]
        x = self.dropout(self.model.embed_tokens(input_ids))  # (B, T, D)
        if document_ids is not None:
            is_compiled = self.training and "forward" in vars(self.layers[0])
            dropout = self.cfg.dropout if self.training else 0.0
            mask = document_mask(document_ids, dropout, self.cfg.head_dim, is_compiled)
            mask = additive_mask(mask, compute_dtype(x))
        mode = self.activation_checkpointing if self.training and torch.is_grad_enabled() else "none"
        # only the load-balancing loss reads it
        documents = index_documents(T, lengths, document_ids) if lengths is not None and self.cfg.num_experts else None
        context = LayerContext(self._rotation(T, position_ids), mask, cache, documents, selective=mode == "selective")
        expert_use = []  # (2, S, E) of each layer
        for layer in self.layers:
            x, use = CHECKPOINTING["full"](layer, x, context) if mode == "full" else layer(x, context)
            expert_use.append(use)
        if cache is not None:
            cache.length += T
            x = x[:, -1:]
        x = self.model.norm(x).to(x.dtype)
        # (S,)
        aux_loss = self.cfg.router_aux_loss_coef * load_balancing_loss(expert_use) if self.cfg.num_experts else None
        if labels is None:
            return ModelOutput(self.lm_head(x), None, aux_loss)
        return ModelOutput(None, self.lm_head(x, labels, reduction), aux_loss)

    @property
    def attention_sizes(self) -> tuple[int, int, int] | None:
        cfg = self.cfg
        return (
            (cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim)
            if cfg.attention == "auto" and not cfg.dropout
            else None
        )

    @property
    def compiled_layers(self) -> Sequence[nn.Module]:
        return list(self.layers)

    def compiled_function(self, layer: nn.Module) -> Callable[..., Any]:
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            layer.mlp.exclude_from_compile()
        return layer.body

    def compile_layers(self, *, single_row: bool, dynamic: bool = True, **options: Any) -> None:
        super().compile_layers(single_row=single_row, dynamic=dynamic, fullgraph=not self.cfg.num_experts, **options)

    def new_cache(self, rows: int, max_length: int, dtype: torch.dtype) -> KVCache:
        return KVCache(self.cfg, rows, max_length, self.frequencies.device, dtype)

    def _rotation(self, T: int, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `LayerContext.rotation` in fp32: bf16 rounds positions 257 and 258 to the same number."""
        positions = (
            torch.arange(T, device=self.frequencies.device).unsqueeze(0) if position_ids is None else position_ids
        )
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(1)  # (B or 1, 1, T, H / 2)
        cos, sin = angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
        return torch.stack([cos, sin], dim=-2), torch.stack([-sin, cos], dim=-2)
