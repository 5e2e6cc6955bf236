"""Cross-entropy of a linear layer's output in chunks of tokens: the logits of all tokens are never in memory together.

reduction="sum" computes the gradients in the forward pass, while the logits of a chunk are in memory. With
reduction="none" each token may get a weight later, so the backward pass recomputes the logits of each chunk. These are
custom operators: the compiler does not trace them.

A chunk has many tokens even where the vocabulary is large: each reads all of the weight, and adds to all of its
gradient. What is computed in fp32 are blocks of its rows, and of the weight's, so that a chunk needs no other memory
than its logits in the dtype of the product.

Shapes: N tokens, n tokens of a chunk or of a block of it, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.cpu_kernels.upcast_products import are_products_upcast, multiply
from models.layers.ops import compute_dtype, custom_op, pad_tokens

IGNORE_LABEL = -100  # label of a token without loss
# CPU: a chunk, or a block of its rows, fits into the caches; GPU: the gradient of the weight is read and written few
# times (16,384 tokens, 151,936 logits on an H100: 50 ms with 2^27 and a sum apart, 40 with 2^28 and within the product)
LOGITS_PER_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 28}
# CPU: to add to the gradient of the weight takes less time than the products of a chunk
MIN_TOKENS_PER_CHUNK = {"cpu": 512, "cuda": 1}
WEIGHT_ROWS_PER_BLOCK = 1 << 14  # rows of the weight whose gradient is computed at once
TILE_TOKENS = 128  # GPU: a product of other numbers of tokens may be slower
_COMPILED_BLOCKS: list[Callable[..., Any]] = []  # of `compile_blocks`


class LMHead(nn.Linear):
    """Output layer: logits, or the loss of given labels."""

    penalties = (0.0, 0.0)  # label smoothing and z-loss (see `penalize`), in training only

    def forward(self, x: Tensor, labels: Tensor | None = None, reduction: str = "none") -> Tensor:
        return super().forward(x) if labels is None else self.loss(x, self.weight, labels, reduction)

    def loss(self, x: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> Tensor:
        if not (self.training and any(self.penalties)):
            return linear_cross_entropy(x, weight, labels, reduction)
        nll = linear_cross_entropy(x, weight, labels, "none")
        with torch.autocast(x.device.type, enabled=False):
            x, weight = x.float(), weight.float()  # fsdp gathers 16 bits
            at_label = (x * F.embedding(labels.clamp(min=0), weight)).sum(-1)
            return penalize(nll, at_label, x @ weight.mean(0), labels, self.penalties, reduction)


def penalize(
    nll: Tensor, at_label: Tensor, mean: Tensor, labels: Tensor, penalties: tuple[float, float], reduction: str
) -> Tensor:
    """Return the loss of each token, or the sum, with label smoothing s, as torch's cross_entropy has it, and z-loss z
    (https://arxiv.org/abs/2204.02311): nll + s (at_label - mean) + z (nll + at_label)^2.

    All (B, T): at_label, the logit of the label; mean, of all logits; nll + at_label is their logsumexp.
    """
    smoothing, z = penalties
    nll = (nll + smoothing * (at_label - mean) + z * (nll + at_label).square()) * (labels != IGNORE_LABEL)
    return nll if reduction == "none" else nll.sum()


def tokens_per_chunk(vocab_size: int, device_type: str) -> int:
    """Return the tokens of a chunk of the loss."""
    device = "cuda" if device_type == "cuda" else "cpu"
    return max(MIN_TOKENS_PER_CHUNK[device], LOGITS_PER_CHUNK[device] // vocab_size)


def tokens_per_block(vocab_size: int, device_type: str) -> int:
    """Return the tokens of a chunk whose logits are computed in fp32 at once."""
    if device_type != "cuda":
        return max(1, LOGITS_PER_CHUNK["cpu"] // vocab_size)
    return max(1, LOGITS_PER_CHUNK["cuda"] // (2 * vocab_size * TILE_TOKENS)) * TILE_TOKENS


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """-log softmax(x @ weight.T)[label] in fp32, 0 for IGNORE_LABEL: x (B, T, D), weight (V, D), labels (B, T) -> (B,
    T), or () their sum.
    """
    flat, y = x.flatten(0, -2).to(compute_dtype(x)), labels.flatten()
    size = tokens_per_chunk(len(weight), x.device.type)
    if reduction == "none":
        return _nll(flat, weight, y, size)[0].view_as(labels)
    grads = torch.is_grad_enabled()
    needed = grads and flat.requires_grad, grads and weight.requires_grad
    return _nll_gradients(flat, weight, y, *needed, size, None, None)[0]


@custom_op("lm_runner::nll_gradients")
def _nll_gradients(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    need_dx: bool,
    need_dw: bool,
    chunk_tokens: int,
    log_sum: Tensor | None,
    g: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x: (N, D), labels: (N,) -> the sum of the losses (), and its gradients for x and weight; empty tensors for those
    not needed.

    With log_sum and g (N,), the result of `_nll` and the gradient of each token's loss: the gradients only.
    """
    w = weight.to(x.dtype)
    block_nll, write_gradient = block_functions(x, need_dx or need_dw)
    nll = x.new_zeros(len(x), dtype=torch.float32)
    # dw: fp32
    dx, dw = x.new_zeros(x.shape if need_dx else 0), torch.zeros(weight.shape if need_dw else 0, device=x.device)
    for rows, y in _chunks(labels, chunk_tokens):
        x_chunk = pad_tokens(x[rows])
        padded = x_chunk @ w.t()
        logits = padded[: len(y)]
        if log_sum is None or g is None:
            blocks = [block_nll(logits[block], y[block], need_dx or need_dw) for block in _blocks(logits)]
            nll[rows] = torch.cat(blocks)
        else:
            token_log_sum, token_g = log_sum[rows].unsqueeze(-1), g[rows].unsqueeze(-1)
            for block in _blocks(logits):
                write_gradient(logits[block], y[block], token_log_sum[block], token_g[block])
        if need_dx:
            dx[rows] = (padded @ w)[: len(y)]
        if need_dw:
            _add_weight_grad(dw, padded, x_chunk)
        del padded, logits  # before those of the next chunk exist
    return nll.sum(), dx, dw.to(weight.dtype)


@torch.library.register_fake("lm_runner::nll_gradients")
def _(
    x: Tensor, weight: Tensor, labels: Tensor, need_dx: bool, need_dw: bool, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dw = x.new_empty(x.shape if need_dx else 0), weight.new_empty(weight.shape if need_dw else 0)
    return x.new_empty((), dtype=torch.float32), dx, dw


def _save_gradients(ctx, inputs, output) -> None:
    ctx.needed = inputs[3:5]
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, g: Tensor, *_) -> tuple[Tensor | None, ...]:
    # overwritten: dw is as large as the weight; autograd refuses a second backward pass then
    dx, dw = ctx.saved_tensors
    need_dx, need_dw = ctx.needed
    return dx.mul_(g) if need_dx else None, dw.mul_(g) if need_dw else None, *[None] * 6


torch.library.register_autograd("lm_runner::nll_gradients", _scale_gradients, setup_context=_save_gradients)


@custom_op("lm_runner::nll")
def _nll(x: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """x: (N, D), labels: (N,) -> the loss of each token (N,), and the logsumexp of its logits (N,)."""
    w = weight.to(x.dtype)
    nll, log_sum = x.new_zeros(2, len(x), dtype=torch.float32).unbind()
    for rows, y in _chunks(labels, chunk_tokens):
        logits = (pad_tokens(x[rows]) @ w.t())[: len(y)]
        log_sum[rows] = chunk_log_sum = torch.cat([logits[block].float().logsumexp(-1) for block in _blocks(logits)])
        nll[rows] = torch.where(y == IGNORE_LABEL, 0.0, chunk_log_sum - at_labels(logits, y).float())
        del logits
    return nll.clone(), log_sum.clone()  # outputs of an operator must not share memory


@torch.library.register_fake("lm_runner::nll")
def _(x: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), dtype=torch.float32)


def _save_inputs(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_tokens = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    x, weight, labels, log_sum = ctx.saved_tensors
    need_dx, need_dw = ctx.needs_input_grad[:2]
    _, dx, dw = _nll_gradients(x, weight, labels, need_dx, need_dw, ctx.chunk_tokens, log_sum, g.contiguous())
    return dx if need_dx else None, dw if need_dw else None, None, None


torch.library.register_autograd("lm_runner::nll", _backward, setup_context=_save_inputs)


def _chunks(labels: Tensor, size: int) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Yield (tokens, labels) of each chunk of `size` tokens.

    On the CPU tokens without a label are left out; on a GPU counting them would be a host sync.
    """
    if labels.is_cuda:  # chunks of one size, in whole tiles of a product
        size = -(-len(labels) // max(1, -(-len(labels) // size)))
        size = -(-size // TILE_TOKENS) * TILE_TOKENS
    else:
        labelled = (labels != IGNORE_LABEL).nonzero().squeeze(-1)
        if len(labelled) < len(labels):
            yield from ((rows, labels[rows]) for rows in labelled.split(size) if len(rows))
            return
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        yield rows, labels[rows]


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield blocks of the rows of a chunk, of at most LOGITS_PER_CHUNK logits; on a GPU of half as many, in whole tiles."""
    size = tokens_per_block(logits.shape[-1], logits.device.type)
    yield from (slice(start, start + size) for start in range(0, len(logits), size))


def compile_blocks(device_type: str, dynamic: bool) -> None:
    """Compute blocks of the loss by compiled functions: a third of the memory traffic. For a GPU whose layers are
    compiled, too. dynamic=False: for batches of one shape, half the time.
    """
    _COMPILED_BLOCKS.clear()
    if device_type == "cuda":
        _COMPILED_BLOCKS[:] = (torch.compile(each, dynamic=dynamic) for each in (fused_nll, fused_gradient))


def block_functions(x: Tensor, is_training: bool) -> Sequence[Callable[..., Any]]:
    """Return `_block_nll` and `_write_gradient`, compiled ones if the run has them.

    Not for evaluations, whose shapes would each need a program, and use up the number that the compiler makes.
    """
    return _COMPILED_BLOCKS if _COMPILED_BLOCKS and x.is_cuda and is_training else (_block_nll, _write_gradient)


def fused_nll(logits: Tensor, y: Tensor, overwrite: bool) -> Tensor:
    """Return what `_block_nll` returns, without an operator that a compiler cannot fuse."""
    log_sum = logits.float().logsumexp(-1, keepdim=True)
    nll = torch.where(y == IGNORE_LABEL, 0.0, log_sum.squeeze(-1) - at_labels(logits, y).float())
    if overwrite:
        fused_gradient(logits, y, log_sum, torch.ones_like(log_sum))
    return nll


def fused_gradient(logits: Tensor, y: Tensor, log_sum: Tensor, g: Tensor) -> None:
    """Do what `_write_gradient` does, without an operator that a compiler cannot fuse."""
    is_label = torch.arange(logits.shape[-1], device=y.device) == y.unsqueeze(-1)
    kept = (y != IGNORE_LABEL).unsqueeze(-1)
    logits.copy_(((logits.float() - log_sum).exp() - is_label.float()) * kept * g)


def _write_gradient(logits: Tensor, y: Tensor, log_sum: Tensor, g: Tensor) -> None:
    """Overwrite logits (n, V) with their gradient. log_sum, g: (n, 1), of their exponentials and of the loss."""
    logits.copy_(_nll_grad(logits.float().sub_(log_sum), y).mul_(g))


def _block_nll(logits: Tensor, y: Tensor, overwrite: bool) -> Tensor:
    """logits: (n, V), y: (n,) -> the loss of each token (n,).

    `overwrite`: write the gradient for the logits in their place.
    """
    log_p = logits.float()
    torch.log_softmax(log_p, -1, out=log_p)  # fp32 logits are overwritten, to save memory
    nll = torch.where(y == IGNORE_LABEL, 0.0, -at_labels(log_p, y))
    if overwrite:
        gradient = _nll_grad(log_p, y)
        if gradient.dtype != logits.dtype:  # fp32 logits were overwritten
            logits.copy_(gradient)
    return nll


def _add_weight_grad(dw: Tensor, p: Tensor, x: Tensor) -> None:
    """dw += p.t() @ x: within the product, or in 16 bits on the CPU and on AMD GPUs in blocks of rows, because the
    product of all would take half of the memory of dw.

    dw: (V, D) in fp32, p: (n, V), x: (n, D).
    """
    if p.dtype == dw.dtype:
        dw.addmm_(p.t(), x)
        return
    if dw.device.type == "cpu" and are_products_upcast():
        multiply(p.t(), x, dw, add=True)
        return
    if dw.is_cuda and p.dtype.itemsize == 2 and not torch.version.hip:
        torch.addmm(dw, p.t(), x, out_dtype=dw.dtype, out=dw)
        return
    for start in range(0, len(dw), WEIGHT_ROWS_PER_BLOCK):
        block = slice(start, start + WEIGHT_ROWS_PER_BLOCK)
        dw[block] += p[:, block].t() @ x


def at_labels(values: Tensor, y: Tensor) -> Tensor:
    """values: (n, V), y: (n,) -> the value at each label (n,)."""
    return values.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _nll_grad(log_p: Tensor, y: Tensor) -> Tensor:
    """Return the gradient (n, V) of each token's loss for its logits; overwrites log_p."""
    p = log_p.exp_()
    p[torch.arange(len(y), device=y.device), y.clamp(min=0)] -= 1
    return p.mul_((y != IGNORE_LABEL).unsqueeze(-1)) if y.is_cuda else p
