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
MAX_ROUNDING_RATIO = 10.0  # an exact kernel differs by less than this many times the difference between rows in a batch and single rows
MIN_TOLERANCE = 1e-6  # of a log-probability, relative to the largest one
AMPLIFIED_STD = 30.0  # of the logits with which the loss is probed
PACKING_METHODS = ("positions", "mask")  # how documents are separated: by position_ids alone, or by a mask (B, 1, T, T)


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
    training = hf.training
    hf.eval()
    try:
        with torch.autocast(hf.device.type, enabled=False):
            return _choose(Probe(hf), attention)
    finally:
        hf.train(training)


def _choose(probe: Probe, attention: str) -> Kernels:
    candidates = {"auto": (IMPLEMENTATION, probe.hf.config._attn_implementation), "own": (IMPLEMENTATION,)}.get(attention, (attention,))
    for implementation in candidates:
        if probe.has_exact_attention(implementation):
            kernels = Kernels(implementation, "none", probe.has_plain_head())
            exact = (method for method in PACKING_METHODS if probe.packs_exactly(replace(kernels, packing=method)))
            return replace(kernels, packing=next(exact, "none"))
    raise UserError(
        f"model.attention={attention} is not exact for {type(probe.hf).__name__}: its output differs from that of transformers",
        f"model.attention={attention}",
        "model.attention=auto",
    )


class Probe:
    """Rows of random tokens, the log-probabilities that a model gives them one by one, and comparisons with these. (tokens of all rows, V)"""

    def __init__(self, hf: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hf, vocabulary = hf, hf.get_input_embeddings().weight.shape[0]
        self.rows = [torch.randint(0, vocabulary, (length,), generator=generator).to(hf.device) for length in PROBE_LENGTHS]
        self.reference = torch.cat([self._log_probs(row[None])[0] for row in self.rows])
        # Rows of one batch are computed by other products than single ones: what differs is rounding.
        self.tolerance = MAX_ROUNDING_RATIO * float((self._padded() - self.reference).abs().max()) + MIN_TOLERANCE * float(self.reference.abs().max())

    def _log_probs(self, ids: Tensor, **arguments: Any) -> Tensor:
        return self.hf(ids, use_cache=False, **arguments).logits.float().log_softmax(-1)

    def _padded(self) -> Tensor:
        """Return the log-probabilities of the rows in a batch, padded on the right."""
        padded = self._log_probs(torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True))
        return torch.cat([padded[i, : len(row)] for i, row in enumerate(self.rows)])

    def _agrees(self, values: Tensor) -> bool:
        return bool((values - self.reference).abs().max() <= self.tolerance)

    def has_exact_attention(self, implementation: str) -> bool:
        """Set the attention of the model; return whether it has the log-probabilities of transformers."""
        try:
            self.hf.set_attn_implementation(implementation)
            return self._agrees(self._padded())
        except (UnsupportedAttentionError, ValueError, NotImplementedError):  # ValueError: transformers refuses it for this class
            return False

    def has_plain_head(self) -> bool:
        """Return whether the logits are the output of the last layer for the last hidden state: some families scale, cap or bias them afterwards.

        The output of the layer is amplified, because caps (Gemma 2: 30 tanh(x / 30)) change small logits by less than rounding.
        """
        head, ids = self.hf.get_output_embeddings(), self.rows[-1][None]
        if not isinstance(head, LMHead):
            return False
        seen: dict[str, Tensor] = {}

        def amplify(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen["input"], seen["output"] = inputs[0], output * (AMPLIFIED_STD / output.std())
            return seen["output"]

        hook = head.register_forward_hook(amplify)
        try:
            logits = self.hf(ids, use_cache=False).logits
        finally:
            hook.remove()
        x = getattr(self.hf.base_model(ids, use_cache=False), "last_hidden_state", None)
        return x is not None and torch.equal(logits.float(), seen["output"].float()) and torch.equal(x, seen["input"])

    def packs_exactly(self, kernels: Kernels) -> bool:
        """Return whether rows in one batch row have the log-probabilities of single rows, and no gradient flows from one to another: a leak of any size."""
        ids, documents, positions = _packed(self.rows)
        inputs: list[Tensor] = []

        def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            inputs.append(output.detach().requires_grad_())
            return inputs[0]

        hook = self.hf.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                values = self._log_probs(ids, **packed_arguments(kernels, documents, positions))[0]
                last = values[sum(PROBE_LENGTHS[:-1]) : sum(PROBE_LENGTHS)]
                gradient = torch.autograd.grad((last * torch.linspace(-1, 1, last.shape[-1], device=last.device)).sum(), inputs[0])[0]
        except (UnsupportedAttentionError, ValueError, TypeError):  # TypeError: a model without positions, e.g. a state-space model
            return False
        finally:
            hook.remove()
        return self._agrees(values[: len(self.reference)].detach()) and not gradient[:, : sum(PROBE_LENGTHS[:-1])].any()


def _packed(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, document ids and positions, (1, T) each, of the rows in one batch row with padding at its end."""
    device = rows[0].device
    padding = torch.zeros(PADDING_LENGTH, dtype=torch.long, device=device)
    documents = torch.cat([torch.full((len(row),), i, device=device) for i, row in enumerate(rows)] + [padding - 1])
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows] + [padding])
    return torch.cat([*rows, padding])[None], documents[None], positions[None]
