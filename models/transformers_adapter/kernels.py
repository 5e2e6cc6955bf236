"""Which kernels compute a model of transformers exactly: found on small inputs with the weights at hand, never assumed from its name.

The reference is the model as transformers computes it, one row at a time. Against it are compared, in this order: the attention of this program,
packed rows (several documents in one batch row), and the chunked loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from models.layers.chunked_loss import LMHead
from models.transformers_adapter.attention import IMPLEMENTATION, UnsupportedAttentionError

PROBE_LENGTHS = (11, 7, 20)  # tokens of the rows that are compared
PADDING_LENGTH = 2  # padding tokens at the end of the packed row
TOLERANCE = 2e-5  # largest difference of a log-probability, relative to the largest one: fp32 rounding; an error of the mask is above 1e-3
AMPLIFIED_STD = 30.0  # of the logits with which the loss is probed
PACKING_METHODS = ("positions", "mask")  # how documents are told apart: by position_ids alone, or by a mask (B, 1, T, T)


@dataclass(frozen=True)
class Kernels:
    """How a model of transformers is computed."""

    attention: str  # attn_implementation of transformers
    packing: str  # one of PACKING_METHODS, or none: packed rows would differ from single ones
    chunked_loss: bool  # the loss comes from the last hidden state and the weight of the output layer; False: from the model's logits

    def describe(self) -> str:
        """Return what was found, for the log."""
        attention = "attention of this program" if self.attention == IMPLEMENTATION else f"attention of transformers ({self.attention})"
        loss = "chunked loss" if self.chunked_loss else "loss from the model's own logits"
        packed = {"positions": "packed rows are exact", "mask": "packed rows are exact with a mask", "none": "packed rows are not exact"}[self.packing]
        return f"of transformers, with {attention}, {loss}; {packed}"


def packed_arguments(kernels: Kernels, document_ids: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a forward pass of packed rows. document_ids (B, T), -1 for padding; position_ids (B, T) start at 0 in each document."""
    assert kernels.packing != "none", "refused by TransformersModel.prepare"
    if kernels.packing == "positions":
        return {"position_ids": position_ids}
    T = document_ids.shape[1]
    allowed = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)) & torch.ones(T, T, dtype=torch.bool, device=document_ids.device).tril()
    mask = allowed.unsqueeze(1)
    if kernels.attention == "eager":  # it adds the mask to the scores
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
    return {"position_ids": position_ids, "attention_mask": mask}


@torch.no_grad()
def choose_kernels(hf: Any, attention: str) -> Kernels:
    """Return the fastest kernels of `hf` that are exact on its device, and set its attention. `attention` is the setting model.attention.

    Raises UserError if a kernel that is asked for by name is not exact.
    """
    training, own_implementation = hf.training, hf.config._attn_implementation
    hf.eval()
    try:
        with torch.autocast(hf.device.type, enabled=False):
            rows, reference = _reference(hf)
            candidates = {"auto": (IMPLEMENTATION, own_implementation), "own": (IMPLEMENTATION,)}.get(attention, (attention,))
            for implementation in candidates:
                if _is_exact(hf, implementation, rows, reference):
                    return _with_loss(hf, _with_packing(hf, Kernels(implementation, "none", chunked_loss=False), rows, reference), rows)
    finally:
        hf.train(training)
    raise UserError(
        f"model.attention={attention} is not exact for {type(hf).__name__}: its output differs from that of transformers",
        f"model.attention={attention}",
        "model.attention=auto",
    )


def _reference(hf: Any) -> tuple[list[Tensor], Tensor]:
    """Return rows of random tokens, and the log-probabilities (tokens of all rows, V) that the model gives them one by one."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = hf.get_input_embeddings().weight.shape[0]
    rows = [torch.randint(0, vocabulary, (length,), generator=generator).to(hf.device) for length in PROBE_LENGTHS]
    return rows, torch.cat([_log_probs(hf, row[None], {})[0] for row in rows])


def _log_probs(hf: Any, ids: Tensor, arguments: dict[str, Any]) -> Tensor:
    return hf(ids, use_cache=False, **arguments).logits.float().log_softmax(-1)


def _agrees(values: Tensor, reference: Tensor) -> bool:
    return bool((values - reference).abs().max() <= TOLERANCE * reference.abs().max())


def _is_exact(hf: Any, implementation: str, rows: list[Tensor], reference: Tensor) -> bool:
    """Set the attention of the model; return whether rows that are padded on the right have the log-probabilities of `reference`."""
    try:
        hf.set_attn_implementation(implementation)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        padded = _log_probs(hf, ids, {})
    except (UnsupportedAttentionError, ValueError, NotImplementedError):  # ValueError: transformers refuses it for this class
        return False
    return _agrees(torch.cat([padded[i, : len(row)] for i, row in enumerate(rows)]), reference)


def _packed(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, document ids and positions, (1, T) each, of the rows in one batch row with padding at its end."""
    device = rows[0].device
    padding = torch.zeros(PADDING_LENGTH, dtype=torch.long, device=device)
    documents = torch.cat([torch.full((len(row),), i, device=device) for i, row in enumerate(rows)] + [padding - 1])
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows] + [padding])
    return torch.cat([*rows, padding])[None], documents[None], positions[None]


def _with_packing(hf: Any, kernels: Kernels, rows: list[Tensor], reference: Tensor) -> Kernels:
    ids, documents, positions = _packed(rows)
    for method in PACKING_METHODS:
        candidate = replace(kernels, packing=method)
        try:
            values = _log_probs(hf, ids, packed_arguments(candidate, documents, positions))
        except (UnsupportedAttentionError, ValueError, TypeError):  # TypeError: a model without positions, e.g. a state-space model
            continue
        if _agrees(values[0, : len(reference)], reference):
            return candidate
    return kernels


def _with_loss(hf: Any, kernels: Kernels, rows: list[Tensor]) -> Kernels:
    """Use the chunked loss if the model's logits are the output of its last layer: some families scale, cap or bias them afterwards.

    The output of the layer is amplified, because caps (Gemma 2: 30 tanh(x / 30)) change small logits by less than rounding.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, LMHead):
        return kernels
    seen: dict[str, Tensor] = {}

    def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["input"], seen["output"] = inputs[0], output * (AMPLIFIED_STD / output.std())
        return seen["output"]

    hook = head.register_forward_hook(amplify)
    try:
        logits = hf(rows[-1][None], use_cache=False).logits
    finally:
        hook.remove()
    x = getattr(hf.base_model(rows[-1][None], use_cache=False), "last_hidden_state", None)
    is_head_output = torch.equal(logits.float(), seen["output"].float())
    return replace(kernels, chunked_loss=is_head_output and x is not None and x.shape == seen["input"].shape and _agrees(x, seen["input"]))
