"""A decoder-only transformer of the Qwen3 shape, dense or mixture of experts; parameter names are transformers' own.

Shapes: B lines, T positions, S sequences (of packed lines several a line, else one), D hidden size, N query heads, K key/value heads,
H head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from models import activation_checkpointing
from models.config import ModelConfig
from models.layers.attention import AttentionMask, document_mask
from models.layers.attention_block import WEIGHT_INIT_STD, DecoderLayer, KVCache, LayerContext, RMSNorm
from models.layers.chunked_loss import LMHead
from models.layers.mlp import SequenceIndex
from models.layers.rope import rope_frequencies


class DecoderOutput(NamedTuple):
    logits: Tensor | None  # (B, T, V), when no labels are given
    nll: Tensor | None  # (B, T) fp32, -log p(label), 0 where there is none; or () their sum
    aux: Tensor | None  # (S,) each sequence's load-balancing loss, None for a dense model


class DecoderBackbone(nn.Module):
    """All but the head; a module of its own because that is what the names `model.layers...` say."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)


class Decoder(nn.Module):
    frequencies: Tensor

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = "none"  # or selective, whole: what the backward pass makes again
        self.model = DecoderBackbone(cfg)
        self.lm_head = LMHead(cfg.hidden_size, cfg.vocab_size, bias=False)
        self.dropout = nn.Dropout(cfg.dropout)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=WEIGHT_INIT_STD)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        frequencies, self.rope_factor = rope_frequencies(cfg)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        sequences: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: AttentionMask = None,
        cache: KVCache | None = None,
        summed: bool = False,
    ) -> DecoderOutput:
        """input_ids, labels, position_ids: (B, T); lengths: (S,) positions of each sequence; padding lies on the right of a line.

        labels[b, t] is the token to predict at position t, IGNORE for none. Packed lines bring `sequences` (B, T), which sequence
        a position belongs to (-1 for padding), and position_ids that begin anew with each; attention stays inside. With a cache,
        `mask` says where to look, and the logits (B, 1, V) are those of the last position alone: a long prompt would fill the
        memory with the others. `summed` asks for the sum of the losses alone, which costs less.
        """
        T = input_ids.shape[1]
        x = self.dropout(self.model.embed_tokens(input_ids))  # (B, T, D)
        if sequences is not None:
            mask = document_mask(sequences, self.cfg.dropout if self.training else 0.0)
        again = self.activation_checkpointing if self.training and torch.is_grad_enabled() else "none"
        context = LayerContext(*self._angles(T, position_ids), mask, cache, self._slots(T, lengths, sequences), lean=again == "selective")
        balance = []
        for layer in self.model.layers:
            x, aux = activation_checkpointing.full_checkpointing(layer, x, context) if again == "whole" else layer(x, context)
            balance.append(aux)
        if cache is not None:
            cache.start += T
            x = x[:, -1:]
        x = self.model.norm(x)
        aux = self.cfg.router_aux_loss_coef * torch.stack(balance).sum(0) if self.cfg.num_experts else None
        if labels is None:
            return DecoderOutput(self.lm_head(x), None, aux)
        return DecoderOutput(None, self.lm_head(x, labels, summed), aux)

    def compile_layers(self, *, lone: bool, **options: Any) -> None:
        """From now on training runs through compiled layers, one program for all of them and for every shape: were there one for the
        shapes that come first and another for the others, a resumed run would round otherwise. `lone`: batches have one line;
        `options` are torch.compile's."""
        from torch._functorch import config as saved

        # Left to itself torch keeps what a product of the backward program reads, though it is made again in passing: silu(gate) * up, a norm's
        # output. A quarter less is kept, for 1 % of a step's time.
        saved.ban_recompute_materialized_backward = False
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.lone = lone
            layer.compiled = torch.compile(layer.body, dynamic=True, fullgraph=not self.cfg.num_experts, **options)

    def _slots(self, T: int, lengths: Tensor | None, sequences: Tensor | None) -> SequenceIndex | None:
        if lengths is None or not self.cfg.num_experts:
            return None  # only the balance of experts asks
        S, t = len(lengths), torch.arange(T, device=lengths.device)
        if sequences is None:
            return SequenceIndex(torch.where(t < lengths.unsqueeze(1), torch.arange(S, device=t.device).unsqueeze(1), S), lengths)
        return SequenceIndex(torch.where(sequences < 0, S, sequences), lengths)

    def _angles(self, T: int, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos and sin (B or 1, 1, T, H / 2) in fp32: bf16 cannot tell position 257 from 258."""
        positions = torch.arange(T, device=self.frequencies.device).unsqueeze(0) if position_ids is None else position_ids
        angles = (positions.unsqueeze(-1) * self.frequencies).unsqueeze(1)  # (B or 1, 1, T, H / 2)
        return angles.cos() * self.rope_factor, angles.sin() * self.rope_factor
