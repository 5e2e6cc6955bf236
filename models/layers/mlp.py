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
from models.layers.cpu_kernels.fused_mlp import supports_width, swiglu_output
from models.layers.cpu_kernels.fused_projection import kernel_projection, project
from models.layers.cpu_kernels.grouped_experts import grouped_experts
from models.layers.ops import compute_dtype, pad_tokens, padded_count

# How the tokens of a batch reach their experts: expert by expert, or by one operator for all of them. Experts with
# biases, adapters or weights in
# 4 bits are always called one by one.
EXPERT_DISPATCHES = ("index_select", "grouped")


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
        self.joins_projections = True  # one product for gate and up
        self.gate_proj = nn.Linear(cfg.hidden_size, width, bias=cfg.mlp_bias)
        self.up_proj = nn.Linear(cfg.hidden_size, width, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(width, cfg.hidden_size, bias=cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(compute_dtype(x))
        if (
            self.attention_kernel == FUSED_KERNEL
            and self.is_plain()
            and supports_width(x.dtype, self.gate_proj.out_features)
        ):
            return swiglu_output(self._gate_up(x), self.down_proj.weight)
        # (..., F)
        gate, up = project(x, (self.gate_proj, self.up_proj), joined=self.joins_projections, uses_kernel=False)
        return self.down_proj(SwiGLU.apply(gate, up))

    def _gate_up(self, x: Tensor) -> Tensor:
        """x: (..., D) -> (..., 2F), gate and up side by side, by the C++ kernel."""
        if self.joins_projections:
            return kernel_projection(x, [self.gate_proj.weight, self.up_proj.weight], None)
        return torch.cat(project(x, (self.gate_proj, self.up_proj), joined=False, uses_kernel=True), dim=-1)

    def is_plain(self) -> bool:
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
        self.dispatch = "index_select"  # one of EXPERT_DISPATCHES
        self.attention_kernel = "auto"  # FUSED_KERNEL: see MLP
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

    def has_plain_experts(self) -> bool:
        """Return whether no expert has biases or adapters: one operator can compute them all."""
        return all(isinstance(expert, MLP) and expert.is_plain() for expert in self.experts)

    def exclude_from_compile(self) -> None:
        """Let torch.compile call the experts without tracing them: it would compile again for other numbers of tokens
        per expert.
        """
        vars(self)["_expert_outputs"] = torch.compiler.disable(self._expert_outputs)

    def _expert_outputs(self, flat: Tensor, chosen: Tensor) -> Tensor:
        """Return the output of each chosen expert: flat (B*T, D), chosen (B*T, k) -> (B*T, k, D).

        Tokens are sorted by expert.

        An expert without tokens has a gradient of zeros for its weights, which the other ranks wait for.
        """
        experts = chosen.flatten()
        counts = experts.bincount(minlength=len(self.experts))
        order = experts.argsort(stable=True)
        if self.dispatch == "grouped" and self.has_plain_experts():
            return self._grouped_outputs(flat, chosen, order, counts)
        return self._selected_outputs(flat, chosen, order, counts.tolist())

    def _selected_outputs(self, flat: Tensor, chosen: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        """Call the experts one by one. index_select is deterministic on the CPU in both directions; the gradient of
        flat[tokens] is not.
        """
        is_inference = not torch.is_grad_enabled()
        groups = flat.index_select(0, order // chosen.shape[1]).split(counts)
        outputs = [
            expert(pad_tokens(group, is_inference=is_inference))[: len(group)]
            for expert, group in zip(self.experts, groups, strict=True)
            if len(group) or not is_inference
        ]
        return torch.cat(outputs).index_select(0, order.argsort()).view(*chosen.shape, -1)

    def _grouped_outputs(self, flat: Tensor, chosen: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        """Call the operator for all experts."""
        x = flat.to(compute_dtype(flat))
        sizes = [padded_count(n, x, is_inference=not torch.is_grad_enabled()) for n in counts.tolist()]
        padding = torch.tensor(sizes, device=counts.device) - counts
        # of the sorted tokens
        rows = torch.arange(len(order), device=order.device) + (padding.cumsum(0) - padding).repeat_interleave(counts)
        slots = torch.empty_like(order).scatter_(0, order, rows).view(chosen.shape)
        gate, up, down = (
            [getattr(expert, name).weight for expert in self.experts] for name in ("gate_proj", "up_proj", "down_proj")
        )
        return grouped_experts(x, slots, sizes, gate, up, down, self.attention_kernel == FUSED_KERNEL)[0]


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
