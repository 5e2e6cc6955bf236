"""Feed-forward layers: the SwiGLU network, and mixtures of them.

Shapes: B rows, T tokens, S documents (several per row when packed, else one per row), D hidden size, F width of a
network, E experts, k experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.families.decoder import DecoderConfig
from models.layers.attention import FUSED_KERNEL
from models.layers.cpu_kernels.fused_attention import supports
from models.layers.ops import compute_dtype, pad_tokens
from models.layers.projections import fused_projection, joined_projection, swiglu_output


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up. The backward pass recomputes silu(gate), which autograd would save."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(g * up, gate), g * F.silu(gate)


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x)). (..., D) -> (..., D)."""

    def __init__(self, cfg: DecoderConfig, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.attention_kernel = "auto"  # FUSED_KERNEL: this network, too, is computed by the C++ kernel
        self.gate_proj = nn.Linear(cfg.hidden_size, width, bias=cfg.mlp_bias)
        self.up_proj = nn.Linear(cfg.hidden_size, width, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(width, cfg.hidden_size, bias=cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        if (
            self.attention_kernel == FUSED_KERNEL
            and self._is_plain()
            and supports(x.dtype, self.gate_proj.out_features)
        ):
            gate_up = joined_projection(x, [self.gate_proj.weight, self.up_proj.weight], None, True)  # (..., 2F)
            return swiglu_output(gate_up, self.down_proj.weight)
        gate, up = fused_projection(x, self.gate_proj, self.up_proj)  # (..., F)
        return self.down_proj(SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate) * up)

    def _is_plain(self) -> bool:
        """Return whether there are no biases and no adapters."""
        return all(
            type(linear) is nn.Linear and linear.bias is None
            for linear in (self.gate_proj, self.up_proj, self.down_proj)
        )


class DocumentIndex(NamedTuple):
    """The document of each token of a batch."""

    ids: Tensor  # (B, T), S for padding
    lengths: Tensor  # (S,) tokens

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the tokens of each document: (B, T, E) -> (S, E)."""
        S, E = len(self.lengths), values.shape[-1]
        sums = values.new_zeros(S + 1, E).index_add(0, self.ids.flatten(), values.reshape(-1, E))[:S]
        return sums / self.lengths.clamp(min=1).unsqueeze(-1)


def index_documents(T: int, lengths: Tensor, document_ids: Tensor | None) -> DocumentIndex:
    """Return the document of each token, from document_ids (B, T) of packed rows, or for one document per row from
    their lengths.
    """
    S, t = len(lengths), torch.arange(T, device=lengths.device)
    if document_ids is None:
        return DocumentIndex(
            torch.where(t < lengths.unsqueeze(1), torch.arange(S, device=t.device).unsqueeze(1), S), lengths
        )
    return DocumentIndex(torch.where(document_ids < 0, S, document_ids), lengths)


class MoE(nn.Module):
    """Feed-forward experts, each token routed to its top k (Qwen3-MoE, https://arxiv.org/abs/2505.09388)."""

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.hidden_size, cfg.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(cfg, cfg.moe_intermediate_size) for _ in range(cfg.num_experts))

    def forward(self, x: Tensor, documents: DocumentIndex | None) -> tuple[Tensor, Tensor]:
        """x: (B, T, D) -> the weighted sum of expert outputs (B, T, D) and the use of the experts (2, S, E)."""
        B, T, D = x.shape
        flat = x.reshape(-1, D)
        probs = self.gate(flat).softmax(-1, dtype=torch.float32)  # (B*T, E)
        weights, chosen = probs.topk(self.cfg.num_experts_per_tok, dim=-1)  # (B*T, k)
        if self.cfg.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        y = (self._expert_outputs(flat, chosen) * weights.unsqueeze(-1)).sum(1).to(flat.dtype)
        return y.view(B, T, D), expert_use(probs.view(B, T, -1), chosen.view(B, T, -1), documents)

    def exclude_from_compile(self) -> None:
        """Let torch.compile call the experts without tracing them: it would compile again for other numbers of tokens
        per expert.
        """
        vars(self)["_expert_outputs"] = torch.compiler.disable(self._expert_outputs)

    def _expert_outputs(self, flat: Tensor, chosen: Tensor) -> Tensor:
        """Return the output of each chosen expert: flat (B*T, D), chosen (B*T, k) -> (B*T, k, D).

        Tokens are sorted by expert. index_select is deterministic on the CPU in both directions; the gradient of
        flat[tokens] is not. An expert without tokens has a gradient of zeros for its weights, which the other ranks
        wait for.
        """
        experts, is_inference = chosen.flatten(), not torch.is_grad_enabled()
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=len(self.experts)).tolist()
        groups = flat.index_select(0, order // chosen.shape[1]).split(counts)
        outputs = [
            expert(pad_tokens(group, is_inference=is_inference))[: len(group)]
            for expert, group in zip(self.experts, groups, strict=True)
            if len(group) or not is_inference
        ]
        return torch.cat(outputs).index_select(0, order.argsort()).view(*chosen.shape, -1)


def expert_use(probs: Tensor, chosen: Tensor, documents: DocumentIndex | None) -> Tensor:
    """Return for each document how often each expert is chosen per token, and its mean probability: probs (B, T, E),
    chosen (B, T, k) -> (2, S, E).
    """
    counts = F.one_hot(chosen, probs.shape[-1]).sum(-2).to(probs.dtype)  # (B, T, E)
    return torch.stack([values.mean(1) if documents is None else documents.mean(values) for values in (counts, probs)])


def load_balancing_loss(used: list[Tensor]) -> Tensor:
    """Return E * sum_e f_e P_e of each document (S,), with f and P averaged over the layers.

    `used`: (2, S, E) of each layer.

    It is the loss that router_aux_loss_coef weighs in transformers (load_balancing_loss_func; Switch Transformer,
    https://arxiv.org/abs/2101.03961, equation 4), of each document instead of each batch: sums over documents add up
    over micro-batches, ranks and packed rows.
    """
    f, p = torch.stack(used).mean(0)  # (S, E) each
    return f.shape[-1] * (f * p).sum(-1)
