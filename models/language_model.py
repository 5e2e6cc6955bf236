"""The interface between the engine and a model family."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from common.errors import UserError, did_you_mean
from models.config import ModelConfig

CALLS = "model(**batch.inputs) for the loss of each token, model(**batch.inputs_without_labels) for logits"


class ModelOutput(NamedTuple):
    logits: Tensor | None  # (B, T, V); None with labels
    # (B, T) fp32, -log p(label), 0 without a label; () their sum with reduction="sum"; None without labels
    nll: Tensor | None
    aux_loss: Tensor | None  # (S,) load-balancing loss of each document; None for a dense model


class Cache(Protocol):
    """A cache with a method `join`, see KVCache, lets rows join a batch."""

    length: int  # cached tokens per row


class LanguageModel(nn.Module):
    """A causal language model that the engine trains and `generate` samples from.

    Parameter names are those of transformers.

    Shapes: B rows, T tokens, S documents (several per row when packed, else one per row), V vocabulary.
    """

    cfg: ModelConfig
    activation_checkpointing: str  # none, selective or full
    kernels_description: str | None = None  # what `prepare` has chosen, for the log
    probes_weights: ClassVar[bool] = False  # what `prepare` chooses depends on the weights
    penalties: tuple[float, float] = (0.0, 0.0)  # of the loss in training
    has_packed_rows: bool = False  # of a run with packed rows: each call says which documents its rows have

    def __call__(
        self,
        input_ids: Any,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        """Call `forward`.

        Raises UserError if rows may be packed and their documents are not given: tokens would attend to other
        documents.

        Only shapes are compared, without a host sync; DDP and FSDP call a model by this method, too.
        """
        if (
            cache is None
            and mask is None
            and (problem := self._missing_documents(len(input_ids), lengths, document_ids, position_ids))
        ):
            raise UserError(
                f"{problem}: tokens of a packed row would attend to other documents", "arguments of the model", CALLS
            )
        return super().__call__(input_ids, labels, lengths, document_ids, position_ids, mask, cache, **options)

    def _missing_documents(
        self, rows: int, lengths: Tensor | None, document_ids: Tensor | None, position_ids: Tensor | None
    ) -> str | None:
        """Return why a call without a cache may be one of packed rows whose documents are not known; None: it is not."""
        if (document_ids is None) != (position_ids is None):
            return "document_ids and position_ids are given together, got one of them"
        if document_ids is None and lengths is not None and len(lengths) != rows:
            return f"{rows:,} rows with {len(lengths):,} documents need document_ids and position_ids"
        if document_ids is None and lengths is None and self.has_packed_rows:
            return "a run with packed rows needs lengths, document_ids and position_ids; lengths alone for rows of one document"
        return None

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: Any = None,
        cache: Any = None,
        reduction: str = "none",
    ) -> ModelOutput:
        """input_ids, labels, position_ids: (B, T); lengths: (S,) tokens of each document; padding is on the right.

        labels[b, t] is the token to predict at t, IGNORE_LABEL for none. Packed rows have `document_ids` (B, T), the
        document of each token (-1 for padding), and position_ids that start at 0 in each document; attention does not
        cross documents. With a cache, `mask` (B, 1, T, cached tokens + T) is True where attention is allowed, and
        logits are (B, 1, V), of the last token only: those of a long prompt would not fit into memory. reduction="sum"
        returns the sum of nll, which takes less time and memory.
        """
        raise NotImplementedError

    def prepare(self, is_packed: bool) -> str | None:
        """Choose kernels; called once when the model has its weights and is on its device, before it is adapted,
        sharded or compiled.

        Returns a line for the log, None where there is no choice. Raises UserError if packed rows are asked for and
        would not be exact.
        """
        return None

    @property
    def attention_sizes(self) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and head width of all layers, where `use_attention_kernel` has an effect; None:
        it has none, or slows them down.
        """
        return None

    def use_attention_kernel(self, kernel: str) -> None:
        """Compute attention on the CPU by one of `attention.CPU_KERNELS`.

        A layer whose attention another library computes ignores it.
        """
        for module in self.modules():
            vars(module)["attention_kernel"] = kernel

    def use_penalties(self, label_smoothing: float, z_loss: float) -> None:
        """Train with `chunked_loss.penalize`; evaluations have the loss without it."""
        for module in self.modules():
            vars(module)["penalties"] = label_smoothing, z_loss

    @property
    def input_layer(self) -> nn.Module:
        """Layer that returns the embeddings of tokens, (B, T) -> (B, T, D). Raises UserError for a family without it."""
        raise UserError(
            f"{type(self).__name__} names no layer of embeddings", "stage.neftune_alpha", "stage.neftune_alpha=0"
        )

    @property
    def output_layer(self) -> nn.Module | None:
        """Layer that computes the logits: adapters of all linear layers leave it out, and it is not quantized.

        None: every LMHead.
        """
        return None

    @property
    def modules_unused_by_text(self) -> tuple[str, ...]:
        """Paths of the modules that text is computed without, e.g. a vision tower: they get no gradient and no new
        adapter.
        """
        return ()

    def is_used_by_text(self, path: str) -> bool:
        """Return whether text is computed with the parameter or the module at `path`."""
        return not any(f"{path}.".startswith(f"{unused}.") for unused in self.modules_unused_by_text)

    @property
    def layers(self) -> nn.ModuleList:
        """Layers with parameters of their own, in order: what FSDP shards one by one."""
        raise NotImplementedError

    @property
    def compiled_layers(self) -> Sequence[nn.Module]:
        """Layers that `compile_layers` compiles, in order; () for a family that overrides `compile_layers`."""
        return ()

    def compiled_function(self, layer: nn.Module) -> Callable[..., Any]:
        """Return what of a layer is compiled: it replaces `layer.forward`."""
        return layer.forward

    def compile_layers(self, *, single_row: bool, dynamic: bool = True, **options: Any) -> None:
        """Train with compiled layers. single_row: batches have one row; options: those of torch.compile.

        One compiled program serves all layers and, unless dynamic=False, all shapes: with one program for the first
        shapes and another for later ones, a resumed run would round differently. With dynamic=False, for batches of one
        shape, FlexAttention takes half the time. Hooks of DDP and FSDP stay outside. Compiled layers recompute
        what a matrix product of the backward pass reads if that is cheap: silu(gate) * up, the output of a norm. By
        default the compiler saves it: saved activations are a quarter larger, and a step is 1 % shorter.
        """
        from torch._functorch import config as functorch_config
        from torch.fx.experimental import _config as shape_config

        if not self.compiled_layers:
            raise NotImplementedError("a family without `compiled_layers` overrides this method")
        functorch_config.ban_recompute_materialized_backward = False
        shape_config.use_duck_shape = False  # rows as long as the model is wide would have a program of their own
        for layer in self.compiled_layers:
            compiled = torch.compile(self.compiled_function(layer), dynamic=dynamic, **options)
            vars(layer)["forward"] = partial(_forward, layer, layer.forward, compiled, single_row)

    def generates_in_batches(self, max_length: int) -> bool:
        """Return whether rows of different lengths, padded on the left, get the logits that each gets alone.

        `max_length`: tokens of the longest row.
        """
        return True

    def new_cache(self, rows: int, max_length: int, dtype: torch.dtype) -> Cache:
        """Return an empty key/value cache for `rows` sequences of up to `max_length` tokens."""
        raise NotImplementedError


def _forward(
    layer: nn.Module, plain: Any, compiled: Any, single_row: bool, x: Tensor, *arguments: Any, **options: Any
) -> Any:
    """Call the compiled layer while training on batches of the compiled kind.

    Evaluation and batches of another kind of row count (the compiler specializes on one row) would cost a second
    compilation.
    """
    is_compiled = layer.training and (len(x) == 1) == single_row
    return (compiled if is_compiled else plain)(x, *arguments, **options)


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that `state_dict()` holds, by name; a tied tensor appears once."""
    names = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in names}


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters; a byte of 4-bit weights holds two."""
    return sum(getattr(p, "quant_state", p).shape.numel() for p in model.parameters())


def trained_parameters(model: LanguageModel) -> dict[str, nn.Parameter]:
    """Return the parameters that get a gradient from text, by name."""
    unused = tuple(f"{path}." for path in model.modules_unused_by_text)
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not name.startswith(unused)}


def freeze(model: LanguageModel, paths: Sequence[str]) -> None:
    """Let training leave the parameters below these paths as they are, e.g. embed_tokens, layers.0-3, layers.0.mlp.

    Raises UserError for a path without parameters, and if no parameter is left to train.
    """
    for path in paths:
        found = [p for name, p in model.named_parameters() if _has_path(name.split("."), path.split("."))]
        if not found:
            names = {
                part for name, _ in model.named_parameters() for part in name.split(".")[:-1] if not part.isdigit()
            }
            raise UserError(
                f"train.freeze: the model has no parameters below {path}",
                f"train.freeze={','.join(paths)}",
                did_you_mean(path, names, f"e.g. train.freeze=[{', '.join(sorted(names)[:3])}]"),
            )
        for p in found:
            p.requires_grad_(False)
    if paths and not trained_parameters(model):
        raise UserError(
            "train.freeze leaves no parameter to train", f"train.freeze={','.join(paths)}", "leave some out"
        )


def _has_path(name: list[str], path: list[str]) -> bool:
    """Return whether the parts of `path`, some of them ranges of layers (0-3), follow each other in `name`."""

    def matches(part: str, wanted: str) -> bool:
        first, dash, last = wanted.partition("-")
        is_range = dash and first.isdigit() and last.isdigit() and part.isdigit()
        return int(first) <= int(part) <= int(last) if is_range else part == wanted

    starts = range(len(name) - len(path) + 1)
    return any(all(map(matches, name[start:], path)) for start in starts)


def create_model(cfg: ModelConfig) -> LanguageModel:
    """Return a model with random weights from torch's global generator, on torch's default device.

    Raises UserError if it is too large for the memory.
    """
    cfg.check_memory()
    module, _, name = cfg.model_class.rpartition(".")
    model: LanguageModel = getattr(importlib.import_module(module), name)(cfg)
    return model
