"""Which kernels compute a model of transformers exactly: found on small inputs with the weights at hand, never assumed
from its name.

The reference is the model as transformers computes it, one row at a time. Against it are compared, in this order: rows
in a batch, the attention of this program, the chunked loss, and packed rows (several documents in one batch row).
Sliding windows are shortened meanwhile, so that the short rows of the probe reach beyond them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from common.errors import UserError
from models.layers.attention import boolean_document_mask
from models.layers.chunked_loss import LMHead
from models.transformers_adapter.attention import IMPLEMENTATION, MARKER, AttentionCalledError

MASKS: Any = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

PROBE_LENGTHS = (11, 7, 20)  # tokens of the rows that are compared
PADDING_LENGTH = 2  # padding tokens at the end of the packed row
# an exact kernel differs by less than this many times the difference between rows in a batch and single rows
MAX_ROUNDING_RATIO = 10.0
MIN_TOLERANCE = 1e-6  # of a log-probability, relative to the largest one
# of a log-probability, relative to the largest one: a larger difference between rows in a batch and single rows is none
MAX_ROUNDING = 1e-3
# rows that are not separated at all must differ by this many times the tolerance, else the weights show no leak
MIN_LEAK_RATIO = 100.0
AMPLIFIED_STD = 30.0  # of the logits with which the loss is probed
PROBE_WINDOW = 5  # tokens of a sliding window or an attention chunk while probing
# of the config of transformers, which reads them in each forward pass
WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
# How documents are separated: by position_ids alone, by a mask (B, 1, T, T), or by a mask for each type of layer.
PACKING_METHODS = ("positions", "mask", "layer_masks")
# What a class of transformers raises for arguments or kernels that it does not compute: refusals, no positions
# (state-space models), no types of layers.
UNSUPPORTED = (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError)


class Kernels(NamedTuple):
    """How a model of transformers is computed."""

    attention: str  # attn_implementation of transformers
    packing: str  # one of PACKING_METHODS, or none: packed rows would differ from single ones
    # the loss comes from the last hidden state and the weight of the output layer; False: from the model's logits
    chunked_loss: bool
    # whether layers of the model call `attention`; those of state-space models and of Bloom compute without
    is_called: bool = True

    def describe(self) -> str:
        """Return what was found, for the log."""
        attention = (
            "attention of this program"
            if self.attention == IMPLEMENTATION
            else f"attention of transformers ({self.attention})"
        )
        attention = attention if self.is_called else "the layers of its class"
        loss = "chunked loss" if self.chunked_loss else "loss from the model's own logits"
        packed = {"positions": "", "mask": " with a mask", "layer_masks": " with a mask for each type of layer"}
        rows = "packed rows are not exact" if self.packing == "none" else f"packed rows are exact{packed[self.packing]}"
        return f"of transformers, with {attention}, {loss}; {rows}"


def packed_arguments(hf: Any, kernels: Kernels, document_ids: Tensor, position_ids: Tensor | None) -> dict[str, Any]:
    """Return the arguments of a forward pass of packed rows. document_ids (B, T), -1 for padding; position_ids (B, T)
    start at 0 in each document.
    """
    assert kernels.packing != "none", "refused by TransformersModel.prepare"
    if kernels.packing == "positions":
        return {"position_ids": position_ids}
    if kernels.packing == "layer_masks":
        config = hf.base_model.config
        dtype = torch.float32 if kernels.attention == "eager" else hf.dtype
        # only its shape, dtype and device are read
        embeddings = torch.empty(*document_ids.shape, 0, dtype=dtype, device=document_ids.device)
        arguments = {
            "config": config,
            "inputs_embeds": embeddings,
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": position_ids,
        }
        return {
            "position_ids": position_ids,
            "attention_mask": {kind: MASKS[kind](**arguments) for kind in set(config.layer_types)},
        }
    mask = boolean_document_mask(document_ids)
    if kernels.attention == "eager":  # it adds the mask to the scores
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
    return {"position_ids": position_ids, "attention_mask": mask}


@torch.no_grad()
def choose_kernels(hf: Any, attention: str) -> Kernels:
    """Return the fastest kernels of `hf` that are exact on its device, and set its attention.

    `attention` is the setting model.attention.

    Raises UserError if a kernel that is asked for by name is not exact, or if the log-probabilities of a row depend on
    anything but its earlier tokens.
    """
    training = hf.training
    hf.eval()
    try:
        with torch.autocast(hf.device.type, enabled=False), _short_windows(hf):
            return _choose(_probe(hf), attention)
    finally:
        hf.train(training)


def _probe(hf: Any) -> Probe:
    """Return a probe with its reference.

    Raises UserError if the model does not compute on its own, or is no causal language model.
    """
    try:
        probe = Probe(hf)
        causal = probe.is_causal()
    except UNSUPPORTED as error:
        problem = f"transformers cannot compute {type(hf).__name__} with this config.json: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UserError(problem, "model.config", "correct config.json, or choose another model") from error
    name, fix = type(hf).__name__, "choose a causal language model; docs/reference/models.md lists what loads"
    if not causal:
        raise UserError(
            f"{name} is not causal: the log-probabilities of a token depend on later tokens", "model.config", fix
        )
    if not probe.rounding <= MAX_ROUNDING * probe.largest:  # also for NaN
        problem = f"{name} computes a row in a batch differently from the row alone: its log-probabilities differ by {probe.rounding:.1e}"
        raise UserError(problem, "model.config", fix)
    return probe


@contextmanager
def _short_windows(hf: Any) -> Iterator[None]:
    """Shorten sliding windows and attention chunks to fewer tokens than the rows of the probe have."""
    configs = {id(module.config): module.config for module in hf.modules() if hasattr(module, "config")}.values()
    lengths = [
        (config, name, value)
        for config in configs
        for name in WINDOW_FIELDS
        if isinstance(value := getattr(config, name, None), int)
    ]
    try:
        for config, name, value in lengths:
            setattr(config, name, min(value, PROBE_WINDOW))
        yield
    finally:
        for config, name, value in lengths:
            setattr(config, name, value)


def _choose(probe: Probe, attention: str) -> Kernels:
    candidates = {"auto": (IMPLEMENTATION, probe.hf.config._attn_implementation), "own": (IMPLEMENTATION,)}.get(
        attention, (attention,)
    )
    for implementation in candidates:
        if probe.has_exact_attention(implementation):
            kernels = Kernels(implementation, "none", probe.has_plain_head(), probe.calls_attention())
            exact = (method for method in PACKING_METHODS if probe.packs_exactly(kernels._replace(packing=method)))
            return kernels._replace(packing=next(exact, "none") if probe.shows_leaks() else "none")
    raise UserError(
        f"model.attention={attention} is not exact for {type(probe.hf).__name__}: its output differs from that of transformers",
        f"model.attention={attention}",
        "model.attention=auto",
    )


class Probe:
    """Rows of random tokens, the log-probabilities that a model gives them one by one, and comparisons with these.
    (tokens of all rows, V)
    """

    def __init__(self, hf: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hf, vocabulary = hf, hf.get_input_embeddings().weight.shape[0]
        self.rows = [
            torch.randint(0, vocabulary, (length,), generator=generator).to(hf.device) for length in PROBE_LENGTHS
        ]
        self.reference = torch.cat([self._log_probs(row[None])[0] for row in self.rows])
        # Rows of one batch are computed by other products than single ones: what differs is rounding.
        self.rounding, self.largest = self._difference(self._padded()), float(self.reference.abs().max())
        self.tolerance = MAX_ROUNDING_RATIO * self.rounding + MIN_TOLERANCE * self.largest

    def _log_probs(self, ids: Tensor, **arguments: Any) -> Tensor:
        return self.hf(ids, use_cache=False, **arguments).logits.float().log_softmax(-1)

    def _padded(self) -> Tensor:
        """Return the log-probabilities of the rows in a batch, padded on the right."""
        padded = self._log_probs(torch.nn.utils.rnn.pad_sequence(self.rows, batch_first=True))
        return torch.cat([padded[i, : len(row)] for i, row in enumerate(self.rows)])

    def _difference(self, values: Tensor) -> float:
        return float((values - self.reference).abs().max())

    def _agrees(self, values: Tensor) -> bool:
        return self._difference(values) <= self.tolerance  # False for NaN

    def is_causal(self) -> bool:
        """Return whether the log-probabilities of a token depend on no later token."""
        half = PROBE_LENGTHS[-1] // 2
        return not self._embedding_gradient(self.rows[-1][None], slice(0, half), {})[:, half:].any()

    def shows_leaks(self) -> bool:
        """Return whether rows in one batch row without any separation have other log-probabilities: else these weights
        cannot show that a method separates them.
        """
        ids = torch.cat(self.rows)[None]
        return self._difference(self._log_probs(ids)[0]) > MIN_LEAK_RATIO * self.tolerance

    def has_exact_attention(self, implementation: str) -> bool:
        """Set the attention of the model; return whether it has the log-probabilities of transformers."""
        try:
            self.hf.set_attn_implementation(implementation)
            return self._agrees(self._padded())
        except UNSUPPORTED:
            return False

    def calls_attention(self) -> bool:
        """Return whether a layer calls the attention that is set."""
        implementation = self.hf.config._attn_implementation
        try:
            self.hf.set_attn_implementation(MARKER)
            self._log_probs(self.rows[0][None])
        except UNSUPPORTED as error:
            return isinstance(error, AttentionCalledError)
        finally:
            self.hf.set_attn_implementation(implementation)
        return False

    def has_plain_head(self) -> bool:
        """Return whether the logits are the output of the last layer for the last hidden state: some families scale,
        cap or bias them afterwards.

        The output of the layer is amplified, because caps (Gemma 2: 30 tanh(x / 30)) change small logits by less than
        rounding.
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
        """Return whether rows in one batch row have the log-probabilities of single rows, and no gradient flows from
        one to another: a leak of any size.
        """
        ids, documents, positions = _packed(self.rows)
        start, end = sum(PROBE_LENGTHS[:-1]), sum(PROBE_LENGTHS)
        try:
            arguments = packed_arguments(self.hf, kernels, documents, positions)
            if not self._agrees(self._log_probs(ids, **arguments)[0, :end]):
                return False
            return not self._embedding_gradient(ids, slice(start, end), arguments)[:, :start].any()
        except UNSUPPORTED:
            return False

    def _embedding_gradient(self, ids: Tensor, tokens: slice, arguments: dict[str, Any]) -> Tensor:
        """Return the gradient (1, T, D) of the log-probabilities of some tokens of `ids` (1, T) for the output of the
        embedding layer.
        """
        inputs: list[Tensor] = []

        def keep(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            inputs.append(output.detach().requires_grad_())
            return inputs[0].clone()  # some models change it in place

        hook = self.hf.get_input_embeddings().register_forward_hook(keep)
        try:
            with torch.enable_grad():
                values = self._log_probs(ids, **arguments)[0, tokens]
                return torch.autograd.grad(
                    (values * torch.linspace(-1, 1, values.shape[-1], device=values.device)).sum(), inputs[0]
                )[0]
        finally:
            hook.remove()


def _packed(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, document ids and positions, (1, T) each, of the rows in one batch row with padding at its end."""
    device = rows[0].device
    padding = torch.zeros(PADDING_LENGTH, dtype=torch.long, device=device)
    documents = torch.cat([torch.full((len(row),), i, device=device) for i, row in enumerate(rows)] + [padding - 1])
    positions = torch.cat([torch.arange(len(row), device=device) for row in rows] + [padding])
    return torch.cat([*rows, padding])[None], documents[None], positions[None]
