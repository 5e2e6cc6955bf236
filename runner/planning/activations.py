"""Bytes that a forward pass of the decoder saves for its backward pass, per layer, and what one layer needs while it is
computed.

The formula counts the tensors that autograd keeps in models/layers/ without torch.compile, which saves fewer. Letters
are those of `LayerSizes`; n = R * T tokens of the micro-batch, c bytes of a number of the computation (4 in fp32, 2 in
bf16 and fp16).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from runner.planning.facts.data import BatchShape
from runner.planning.facts.model import LayerSizes

FP32 = 4
GATED = ("gate_proj", "up_proj")
ATTENDED = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Computation:
    """How the numbers of a layer are computed."""

    width: int  # c
    on_cpu: bool
    checkpointing: str  # train.activation_checkpointing
    trains_all: bool  # False: adapters only
    adapted: Collection[str]  # names of the adapted layers
    rank: int  # of the adapters
    is_compiled: bool = False
    has_fused_attention: bool = False  # the C++ kernel of the CPU, which saves no probabilities
    is_upcast: bool = False  # products in 16 bits are computed in fp32


def saved_per_layer(layer: LayerSizes, shape: BatchShape, how: Computation) -> int:
    """Return the bytes that stay in memory from the forward pass of a layer until its backward pass."""
    n, c = shape.numbers, how.width
    if how.checkpointing == "full":
        return n * layer.hidden * FP32
    if how.checkpointing == "selective":
        products = (
            layer.queries + 2 * layer.keys + layer.queries + 2 * layer.hidden + layer.experts_per_token * 2 * layer.mlp
        )
        return n * (layer.hidden * FP32 + products * c) * (1 if how.trains_all else 2)
    if is_counted_compiled(layer, how):
        return n * _saved_per_token_compiled(layer, how) + _saved_probs(layer, shape, how)
    return n * _saved_per_token(layer, how) + _saved_probs(layer, shape, how) + weight_copies(layer, how)


def is_counted_compiled(layer: LayerSizes, how: Computation) -> bool:
    """Return whether the formula knows what the compiled layer saves; otherwise it counts the layer as if it was not
    compiled, which is more.
    """
    return how.is_compiled and how.on_cpu and layer.is_exact and not layer.experts


def weight_copies(layer: LayerSizes, how: Computation) -> int:
    """Return the bytes of weights that a layer keeps rounded to 16 bits; weights that are joined for one product are
    joined again in the backward pass.
    """
    if how.width == FP32 or _has_fused_mlp(layer, how):  # whose kernels read the weights themselves
        return 0
    every = layer.hidden * (2 * layer.queries + 2 * layer.keys) + max(1, layer.experts) * 3 * layer.hidden * layer.mlp
    joined = sum(_joined_weights(layer, how)) if layer.is_exact else 0
    return (every - joined) * how.width


def _joined_weights(layer: LayerSizes, how: Computation) -> tuple[int, int]:
    """Return the numbers of the weights that are joined, of attention and of the networks."""
    attention = layer.hidden * (layer.queries + 2 * layer.keys) * _is_fused(how, ATTENDED)
    return attention, max(1, layer.experts) * 2 * layer.hidden * layer.mlp * _is_fused(how, GATED)


def layer_workspace(layer: LayerSizes, shape: BatchShape, how: Computation) -> int:
    """Return the bytes of temporary tensors at the largest moment of the backward pass of one layer.

    Where the layer was checkpointed, its activations are recomputed first.
    """
    n, c, k = shape.numbers, how.width, layer.experts_per_token
    # of the residual stream; of gate, up, both together, and a product
    gradients = n * (2 * layer.hidden * FP32 + k * 5 * layer.mlp * c)
    # gradients of the joined product, before they are split
    weights = 3 * layer.hidden * layer.mlp * FP32 if how.trains_all else 0
    weights += 2 * layer.hidden * layer.mlp * c * layer.is_exact  # the weights of that product, joined
    weights += 2 * layer.hidden * layer.mlp * FP32 * how.is_upcast  # and in fp32
    plain = dataclasses.replace(how, checkpointing="none")
    again = saved_per_layer(layer, shape, plain) if how.checkpointing != "none" else 0
    return gradients + weights + again


def _saved_per_token(layer: LayerSizes, how: Computation) -> int:
    """Return the bytes per token."""
    c, D, Q, K, F, k = how.width, layer.hidden, layer.queries, layer.keys, layer.mlp, layer.experts_per_token
    residual = 2 * D * FP32  # the input of both norms
    normalized = 2 * D * FP32 if how.trains_all else 0  # before the weight of the norm, for its gradient
    inputs = (2 * D + Q) * c  # of the projections of attention, of the MLP and of the output of attention
    projected = (Q + 2 * K) * c
    norms = (Q + K) * FP32 * (how.trains_all + (c != FP32)) if layer.qk_norm else 0
    rotated = (Q + K) * c
    if not how.trains_all and c != FP32 and not layer.qk_norm:
        projected = K * c  # only the values are read again
    mlp = k * (2 if _has_fused_mlp(layer, how) else 3) * F * c
    # inputs and outputs of the experts, probabilities
    routed = (2 * k * D * c + layer.experts * 3 * FP32) if layer.experts else 0
    adapters = len(how.adapted) * how.rank * c
    sums = layer.heads * FP32 * how.has_fused_attention  # log-sum-exp of the scores
    return sums + residual + normalized + inputs + projected + norms + rotated + mlp + routed + adapters


def _saved_per_token_compiled(layer: LayerSizes, how: Computation) -> int:
    """Return the bytes per token of a compiled layer: the inputs of operators that are not recomputed.

    Norms and weights of 16 bits are.
    """
    c, D, Q, K, F = how.width, layer.hidden, layer.queries, layer.keys, layer.mlp
    residual = D * FP32 + D * c  # the input of the layer, and the output of attention that is added to it
    # projected, and the input of the output projection; rotated queries and keys are recomputed
    attention = (Q + 2 * K) * c + Q * c
    statistics = (2 + layer.heads * (1 + layer.qk_norm) + K * layer.heads // Q * layer.qk_norm) * FP32
    adapters = len(how.adapted) * how.rank * c
    return residual + attention + 2 * F * c + statistics + adapters


def _saved_probs(layer: LayerSizes, shape: BatchShape, how: Computation) -> int:
    """Return the bytes of attention probabilities, which the kernel of the CPU saves up to a limit, and of the mask,
    which all layers share.
    """
    from models.layers.attention import MAX_SAVED_PROBS, QUERY_BLOCK

    R, T = shape.rows, shape.tokens
    if not how.on_cpu or how.has_fused_attention or R * layer.heads * T * T > MAX_SAVED_PROBS:
        return 0
    return R * layer.heads * T * (T + QUERY_BLOCK) // 2 * how.width


def _has_fused_mlp(layer: LayerSizes, how: Computation) -> bool:
    """Return whether C++ kernels compute the projections and the network, too: they save no product of gate and up, and
    no rounded weights.
    """
    return how.has_fused_attention and how.trains_all and layer.is_exact


def _is_fused(how: Computation, names: Collection[str]) -> bool:
    return not any(name in how.adapted for name in names)
