"""The load-balancing loss of experts in a model of transformers: that of `load_balancing_loss_func`, of each document
instead of each batch.

Shapes: B rows, T tokens, S documents, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.families.transformers import TransformersConfig
from models.layers.mlp import expert_use, index_documents, load_balancing_loss

TOP_K_FIELDS = ("num_experts_per_tok", "moe_k")  # of the config of transformers: experts that a token is routed to
OUTPUT = "router_logits"  # name under which transformers records the output of routers
LOSS_FUNCTION = "load_balancing_loss_func"  # of a module of transformers whose model has this loss
PROBE_SHAPE = (2, 16)  # tokens with which the loss is compared
BALANCE_TOLERANCE = 1e-5  # relative


class BalanceLoss:
    """Records the logits of the routers during a forward pass, and computes the loss from them.

    It is the loss of the engine's own experts (`models/layers/mlp.py`). `problem`: why there is none, None for a dense
    model or where there is one.
    """

    def __init__(self, hf: Any, cfg: TransformersConfig) -> None:
        config = hf.config.get_text_config(decoder=True)
        given = getattr(config, "router_aux_loss_coef", None)
        self.coefficient = float(cfg.router_aux_loss_coef if cfg.router_aux_loss_coef is not None else given or 0.0)
        self.top_k = next((value for name in TOP_K_FIELDS if isinstance(value := getattr(config, name, None), int)), 0)
        self.recorded: list[Tensor] | None = None  # (B * T, E) of each layer with experts; None: not recording
        self.index, routers = _routers(hf.base_model)
        self.has_experts = bool(routers)
        self.problem = self._problem(hf, given, cfg.leaves_out_balance_loss)
        if self.is_active:
            for router in routers:
                router.register_forward_hook(self._record)

    @property
    def is_active(self) -> bool:
        return self.has_experts and self.problem is None

    def _problem(self, hf: Any, given: float | None, is_left_out: bool) -> str | None:
        if not self.has_experts:
            return None
        if not hasattr(sys.modules[type(hf).__module__], LOSS_FUNCTION) or not self.top_k:
            return f"transformers has none for {type(hf).__name__}"
        if given is None and not self.coefficient:
            return "config.json has no router_aux_loss_coef"
        if is_left_out and self.coefficient:
            return (
                f"config.json has output_router_logits=false; model.router_aux_loss_coef={self.coefficient:g} adds it"
            )
        return f"router_aux_loss_coef is {self.coefficient:g}" if self.coefficient <= 0 else None

    @torch.compiler.disable
    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.recorded is not None:
            self.recorded.append(output[self.index] if isinstance(output, tuple) else output)

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the logits of the routers in one forward pass; not in a backward pass that computes a layer again."""
        recorded: list[Tensor] = []
        self.recorded = recorded if self.is_active else None
        try:
            yield recorded
        finally:
            self.recorded = None

    def loss(
        self, recorded: list[Tensor], shape: torch.Size, lengths: Tensor | None, document_ids: Tensor | None
    ) -> Tensor | None:
        """Return the weighted loss of each document (S,), None without one.

        `shape`: (B, T) of the pass whose logits are `recorded`.
        """
        if not self.is_active:
            return None
        documents = None if lengths is None else index_documents(shape[1], lengths, document_ids)
        used = []
        for logits in recorded:
            probs = logits.view(*shape, -1).softmax(-1, dtype=torch.float32)  # (B, T, E)
            used.append(expert_use(probs, probs.topk(self.top_k, dim=-1).indices, documents))
        return self.coefficient * load_balancing_loss(used)

    @torch.no_grad()
    def check(self, hf: Any) -> None:
        """Switch the loss off, with the reason in `problem`, unless it is that of transformers for the weights at hand."""
        if not self.is_active:
            return
        generator = torch.Generator().manual_seed(0)
        vocabulary = hf.get_input_embeddings().weight.shape[0]
        ids = torch.randint(0, vocabulary, PROBE_SHAPE, generator=generator).to(hf.device)
        was_training = hf.training
        hf.eval()
        expected = [hf(row[None], use_cache=False, output_router_logits=True).aux_loss for row in ids]
        with self.recording() as recorded:
            hf(ids, use_cache=False)
        hf.train(was_training)
        found = self.loss(recorded, ids.shape, None, None)
        assert found is not None
        if any(loss is None for loss in expected):
            self.problem = f"{type(hf).__name__} returns none"
        elif not torch.allclose(found, self.coefficient * torch.stack(expected).float(), rtol=BALANCE_TOLERANCE):
            self.problem = f"that of {type(hf).__name__} has another definition"

    def describe(self) -> str:
        """Return what is done, for the log; empty for a dense model."""
        if not self.has_experts:
            return ""
        return (
            f"; no load-balancing loss: {self.problem}"
            if self.problem
            else f"; load-balancing loss times {self.coefficient:g}"
        )


def _routers(model: nn.Module) -> tuple[int, list[nn.Module]]:
    """Return which output of a router has its logits, and the routers, as transformers records them; no router for a
    dense model or an unknown form.
    """
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get(OUTPUT)
    target = getattr(recorder, "target_class", None)
    if recorder is None or target is None:
        return 0, []
    name = recorder.layer_name
    return recorder.index, [
        module
        for path, module in model.named_modules()
        if isinstance(module, target) and (name is None or f".{name}." in f".{path}.")
    ]
