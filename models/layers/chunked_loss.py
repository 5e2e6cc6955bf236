"""Cross-entropy behind a linear layer, a chunk of positions at a time: the logits of all positions never exist together.

Where only the sum is asked for, the gradients are made in the forward pass, while a chunk's logits are at hand; where each position may be
weighed later, the backward pass makes the logits of each chunk once more. These are operators of their own, so a compiler need not look inside.

Shapes: N positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.layers.custom_op import custom_op

IGNORE_LABEL = -100  # the label of a position that carries no loss
LOGITS_PER_CHUNK = {"cpu": 1 << 22, "cuda": 1 << 27}  # what the caches of a processor like; what lets a GPU forget its launches


class LMHead(nn.Linear):
    """The last layer: logits, or with labels each position's loss, or their sum."""

    def forward(self, x: Tensor, labels: Tensor | None = None, summed: bool = False) -> Tensor:
        return super().forward(x) if labels is None else linear_cross_entropy(x, self.weight, labels, summed)


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, summed: bool) -> Tensor:
    """-log softmax(x @ weight.T)[label] in fp32, 0 without a label, as `labels` (B, T); or the sum of all. x: (B, T, D); weight: (V, D)"""
    flat, y = x.flatten(0, -2).to(compute_dtype(x)), labels.flatten()
    if not summed:
        return _nll(flat, weight, y)[0].view_as(labels)
    grads = torch.is_grad_enabled()
    return _nll_sum(flat, weight, y, grads and flat.requires_grad, grads and weight.requires_grad)[0]


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product of `x` is computed in here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@custom_op("lm_runner::nll_sum")
def _nll_sum(x: Tensor, weight: Tensor, labels: Tensor, learn_x: bool, learn_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and its gradient for x and for weight; an empty one where it is not wanted."""
    w = weight.to(x.dtype)
    nll = x.new_zeros(len(x), dtype=torch.float32)
    dx, dw = x.new_zeros(x.shape if learn_x else 0), torch.zeros(weight.shape if learn_weight else 0, device=x.device)  # fp32
    for rows, y in _chunks(labels, len(weight)):
        some = x[rows]
        log_p = _log_softmax(some @ w.t())
        nll[rows] = _label_nll(log_p, y)
        if learn_x or learn_weight:
            p = _nll_grad(log_p, y).to(x.dtype)
            del log_p  # all of a step's activations are in memory now: what a chunk needs comes on top
            if learn_x:
                dx[rows] = p @ w
            if learn_weight:
                dw += p.t() @ some
    return nll.sum(), dx, dw.to(weight.dtype)


@torch.library.register_fake("lm_runner::nll_sum")
def _(x: Tensor, weight: Tensor, labels: Tensor, learn_x: bool, learn_weight: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty(x.shape if learn_x else 0), weight.new_empty(weight.shape if learn_weight else 0)


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.learn = inputs[3:]
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, g: Tensor, *_) -> tuple[Tensor | None, ...]:
    dx, dw = ctx.saved_tensors
    learn_x, learn_weight = ctx.learn
    return (dx * g).to(dx.dtype) if learn_x else None, dw * g if learn_weight else None, None, None, None


torch.library.register_autograd("lm_runner::nll_sum", _scale_gradients, setup_context=_keep_gradients)


@custom_op("lm_runner::nll")
def _nll(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Each position's loss, and the logarithm of the sum its softmax is divided by."""
    w = weight.to(x.dtype)
    nll, total = x.new_zeros(2, len(x), dtype=torch.float32).unbind()
    for rows, y in _chunks(labels, len(weight)):
        logits = (x[rows] @ w.t()).float()
        total[rows] = log_sum = logits.logsumexp(-1)
        nll[rows] = _label_nll(logits.sub_(log_sum.unsqueeze(-1)), y)
    return nll.clone(), total.clone()  # two outputs must not share their memory


@torch.library.register_fake("lm_runner::nll")
def _(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), dtype=torch.float32)


@custom_op("lm_runner::nll_backward")
def _nll_backward(g: Tensor, x: Tensor, weight: Tensor, labels: Tensor, total: Tensor, learn_x: bool, learn_weight: bool) -> tuple[Tensor, Tensor]:
    w = weight.to(x.dtype)
    dx, dw = x.new_zeros(x.shape if learn_x else 0), torch.zeros(weight.shape if learn_weight else 0, device=x.device)  # fp32
    for rows, y in _chunks(labels, len(weight)):
        some = x[rows]
        p = _nll_grad((some @ w.t()).float().sub_(total[rows].unsqueeze(-1)), y).mul_(g[rows].unsqueeze(-1)).to(x.dtype)
        if learn_x:
            dx[rows] = p @ w
        if learn_weight:
            dw += p.t() @ some
    return dx, dw.to(weight.dtype)


@torch.library.register_fake("lm_runner::nll_backward")
def _(g: Tensor, x: Tensor, weight: Tensor, labels: Tensor, total: Tensor, learn_x: bool, learn_weight: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if learn_x else 0), weight.new_empty(weight.shape if learn_weight else 0)


def _keep_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _scale(ctx, g: Tensor, _) -> tuple[Tensor | None, ...]:
    x, weight, labels, total = ctx.saved_tensors
    learn_x, learn_weight = ctx.needs_input_grad[:2]
    dx, dw = _nll_backward(g.contiguous(), x, weight, labels, total, learn_x, learn_weight)
    return dx if learn_x else None, dw if learn_weight else None, None


torch.library.register_autograd("lm_runner::nll", _scale, setup_context=_keep_inputs)


def _chunks(labels: Tensor, words: int) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """The positions in groups, and their labels. Without a label they are left out, but for a GPU: it would wait for their number."""
    size = max(1, LOGITS_PER_CHUNK["cuda" if labels.is_cuda else "cpu"] // words)
    if not labels.is_cuda:
        labelled = (labels != IGNORE_LABEL).nonzero().squeeze(-1)
        if len(labelled) < len(labels):
            yield from ((rows, labels[rows]) for rows in labelled.split(size) if len(rows))
            return
    for start in range(0, len(labels), size):
        rows = slice(start, start + size)
        yield rows, labels[rows]


def _log_softmax(logits: Tensor) -> Tensor:
    """In fp32, in as little memory as it can be: in the place of `logits` where these are fp32 themselves."""
    log_p = logits.float()
    return torch.log_softmax(log_p, -1, out=log_p)


def _label_nll(log_p: Tensor, y: Tensor) -> Tensor:
    """The loss of each row (N, V) under its label (N,)."""
    return torch.where(y == IGNORE_LABEL, 0.0, -log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1))


def _nll_grad(log_p: Tensor, y: Tensor) -> Tensor:
    """The gradient of each row's loss for its logits, in the place of `log_p`."""
    p = log_p.exp_()
    p.scatter_add_(-1, y.clamp(min=0).unsqueeze(-1), p.new_full((), -1.0).expand(len(y), 1))
    return p.mul_((y != IGNORE_LABEL).unsqueeze(-1)) if y.is_cuda else p
