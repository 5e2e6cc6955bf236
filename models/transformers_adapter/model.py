"""A causal language model of transformers behind the engine's interface: packed rows, chunked loss, compiled layers,
cached generation; and its weights under the names of published folders.

Shapes: B rows, T tokens, C tokens with the cached ones, S documents, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from common.errors import UserError
from models.families.transformers import DROPOUT_FIELDS, TransformersConfig, create_hf_config, length_dependence
from models.language_model import LanguageModel, ModelOutput
from models.layers.chunked_loss import IGNORE_LABEL, LMHead, at_labels, penalize
from models.layers.ops import CHECKPOINTING
from models.transformers_adapter.attention import IMPLEMENTATION, register_attention
from models.transformers_adapter.balance import BalanceLoss
from models.transformers_adapter.generation import (
    GenerationMethod,
    TransformersCache,
    choose_generation,
)
from models.transformers_adapter.kernels import WINDOW_FIELDS, Kernels, choose_kernels, packed_arguments

MAX_LISTED_TENSORS = 6  # tensors that an error names of each kind
DOWNLOAD_AGAIN = "download the folder again"
REPORTED = {  # by field of the report of transformers
    "missing_keys": "missing",
    "unexpected_keys": "not known to the model",
    "mismatched_keys": "of another shape",
    "conversion_errors": "not converted",
    "error_msgs": "errors",
}


class TransformersModel(LanguageModel):
    """Submodules and parameters are those of the model of transformers, under the same names."""

    cfg: TransformersConfig
    hf: Any  # PreTrainedModel
    kernels: Kernels
    probes_weights = True

    def __init__(self, cfg: TransformersConfig) -> None:
        super().__init__()
        register_attention()
        self.cfg = cfg
        hf = AutoModelForCausalLM.from_config(
            create_hf_config(cfg.config, "model.config"), trust_remote_code=False, dtype=torch.float32
        )
        head = hf.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None:
            head.__class__ = LMHead
        object.__setattr__(self, "hf", hf)  # not registered: its children are, under the names that they have in it
        for name, child in hf.named_children():
            self.add_module(name, child)
        for name, parameter in hf.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.kernels = Kernels(hf.config._attn_implementation, "none", chunked_loss=False)
        self.balance = BalanceLoss(hf, cfg)
        self._checkpointing = "none"
        self._method: GenerationMethod | None = None
        self._accepted = frozenset(inspect.signature(hf.forward).parameters)

    def prepare(self, is_packed: bool) -> str:
        self.kernels = choose_kernels(self.hf, self.cfg.attention)
        self.balance.check(self.hf)
        if is_packed and self.kernels.packing == "none":
            raise UserError(
                f"packed rows of {self.cfg.name} would not be exact: their log-probabilities differ from those of single rows",
                "data.packing",
                "data.packing=none",
            )
        return self.kernels.describe() + self.balance.describe()

    def train(self, mode: bool = True) -> TransformersModel:
        self.hf.training = mode
        super().train(mode)
        return self

    @property
    def input_layer(self) -> nn.Module:
        layer: nn.Module = self.hf.get_input_embeddings()
        return layer

    @property
    def output_layer(self) -> nn.Module | None:
        layer: nn.Module | None = self.hf.get_output_embeddings()
        return layer

    @cached_property
    def modules_unused_by_text(self) -> tuple[str, ...]:
        """What a multimodal class has around its text model: towers for images and sound, and their projections."""
        base, text = self.hf.base_model, self.hf.get_decoder()
        if self.hf.config.get_text_config(decoder=True) is self.hf.config:
            return ()
        paths = {id(module): path for path, module in self.hf.named_modules()}
        start, end = paths[id(base)], paths.get(id(text), "")
        if base is self.hf or not end.startswith(f"{start}."):
            return ()
        on_path = [start, *(end[:i] for i in range(len(start) + 1, len(end)) if end[i] == "."), end]
        children = (
            f"{path}.{name}" for path in on_path[:-1] for name, _ in self.hf.get_submodule(path).named_children()
        )
        return tuple(child for child in children if child not in on_path)

    @property
    def layers(self) -> nn.ModuleList:
        """Those whose parameters belong to no other module: a parameter that layers share stays with the rest of the
        model.
        """
        uses = _parameter_uses(self)
        return nn.ModuleList(
            layer
            for layer in self._blocks()
            if all(uses[parameter] == count for parameter, count in _parameter_uses(layer).items())
        )

    def _blocks(self) -> list[nn.Module]:
        """Return the repeated blocks of the model, none inside of another; [] if its class names none."""
        modules = list(self.hf.base_model.modules())
        whole = set(self.hf._no_split_modules or ())
        found = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
        found = found or [module for module in modules if whole & {cls.__name__ for cls in type(module).__mro__}]
        inner = {id(child) for module in found for child in module.modules() if child is not module}
        return [module for module in found if id(module) not in inner]

    @property
    def activation_checkpointing(self) -> str:
        return self._checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: str) -> None:
        self._checkpointing = mode
        if mode == "none":
            return
        if not (blocks := self._blocks()):
            setting = f"train.activation_checkpointing={mode}"
            raise UserError(
                f"{type(self.hf).__name__} of transformers has no layers that can be recomputed one by one",
                setting,
                "train.activation_checkpointing=none",
            )
        for block in blocks:
            if isinstance(block, GradientCheckpointingLayer):
                vars(block).update(gradient_checkpointing=True, _gradient_checkpointing_func=CHECKPOINTING[mode])
            else:
                vars(block)["forward"] = partial(_recomputed_forward, block, block.forward, CHECKPOINTING[mode])

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        lengths: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: TransformersCache | None = None,
        reduction: str = "none",
    ) -> ModelOutput:
        if cache is not None:
            return ModelOutput(cache.step(input_ids, position_ids, mask, self._accepted), None, None)
        arguments: dict[str, Any] = {"use_cache": False}
        if document_ids is not None:
            arguments |= packed_arguments(self.hf, self.kernels, document_ids, position_ids)
        with self.balance.recording() as router_logits:
            logits, nll = self._compute(input_ids, labels, reduction, arguments)
        return ModelOutput(logits, nll, self.balance.loss(router_logits, input_ids.shape, lengths, document_ids))

    def _compute(
        self, input_ids: Tensor, labels: Tensor | None, reduction: str, arguments: dict[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return (logits, None) without labels, (None, nll) with them.

        `arguments`: further ones of the model of transformers.
        """
        if labels is None:
            return self.hf(input_ids, **arguments).logits, None
        if self.kernels.chunked_loss:
            x = self.hf.base_model(input_ids, **arguments).last_hidden_state  # (B, T, D)
            return None, self.hf.get_output_embeddings()(x, labels, reduction)
        logits = self.hf(input_ids, **arguments).logits.float()  # (B, T, V)
        is_penalized = self.training and any(self.penalties)
        kind = "none" if is_penalized else reduction
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction=kind)
        if is_penalized:
            parts = nll.view_as(labels), at_labels(logits, labels), logits.mean(-1), labels
            return None, penalize(*parts, self.penalties, reduction)
        return None, nll if reduction == "sum" else nll.view_as(labels)

    @property
    def attention_sizes(self) -> tuple[int, int, int] | None:
        """None for sliding windows, whose masks the fused kernel refuses, for dropout of probabilities, and for
        attention of transformers.
        """
        if self.kernels.attention != IMPLEMENTATION or not self.kernels.is_called:
            return None
        config = self.hf.config.get_text_config()
        with suppress(RuntimeError):  # of a field that differs between the layers
            heads = getattr(config, "num_attention_heads", None)
            others = any(getattr(config, name, None) for name in (*WINDOW_FIELDS, *DROPOUT_FIELDS))
            if isinstance(heads, int) and not others:
                return (
                    heads,
                    getattr(config, "num_key_value_heads", None) or heads,
                    getattr(config, "head_dim", None) or config.hidden_size // heads,
                )
        return None

    def generates_in_batches(self, max_length: int) -> bool:
        dependence = length_dependence(self.hf.config)
        return self._generation().in_batches and (dependence is None or max_length <= dependence.length)

    def _generation(self) -> GenerationMethod:  # as a property, an AttributeError in it would name the property
        """Return how this model generates, found at its first generation."""
        if self._method is None:
            self._method = choose_generation(self, self._accepted)
        return self._method

    @property
    def compiled_layers(self) -> Sequence[nn.Module]:
        return self._blocks() or [self.hf.base_model]

    def new_cache(self, rows: int, max_length: int, dtype: torch.dtype) -> TransformersCache:
        return TransformersCache(self.hf, self._generation().has_cache)


def _parameter_uses(module: nn.Module) -> Counter[int]:
    """Return how many modules inside have each parameter, by its id."""
    return Counter(id(parameter) for inner in module.modules() for parameter in inner.parameters(recurse=False))


def _recomputed_forward(block: nn.Module, forward: Any, recompute: Any, *arguments: Any, **options: Any) -> Any:
    return (
        recompute(partial(forward, **options), *arguments)
        if block.training and torch.is_grad_enabled()
        else forward(*arguments, **options)
    )


def to_transformers_names(stored: dict[str, Tensor], cfg: TransformersConfig, where: str) -> dict[str, Tensor]:
    """Return the tensors of a model folder as fp32 weights under the names of its class: transformers renames, merges
    and splits those of some families.

    Raises UserError, about the folder `where`, if a tensor of the model is missing, is stored with another shape, or is
    not known to the class.
    """
    register_attention()
    hf_config = create_hf_config(cfg.config, where)
    with torch.device("meta"):
        meta: Any = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=False)
    cls: Any = type(meta)
    own = meta.state_dict()
    # transformers would cast integers to weights; those that its class does not read, as masks in old files, are no
    # fault
    integers = [
        name
        for name, tensor in stored.items()
        if not tensor.is_floating_point() and (name not in own or own[name].is_floating_point())
    ]
    stored = {name: tensor for name, tensor in stored.items() if name not in integers}
    try:
        model, report = cls.from_pretrained(
            None,
            config=hf_config,
            state_dict=stored,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # of the conversion of foreign tensors
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise UserError(
            f"transformers cannot load the weights: {(str(error) or type(error).__name__).splitlines()[0]}",
            where,
            DOWNLOAD_AGAIN,
        ) from error
    problems = [line for kind, text in REPORTED.items() if (line := _list_tensors(text, report.get(kind)))]
    if integers and (problems or any(name in own for name in integers)):
        problems.append(_list_tensors("of an integer type", integers))
    if problems:
        raise UserError(
            "the weights do not fit config.json: " + "; ".join(problems),
            where,
            f"{DOWNLOAD_AGAIN}; or choose the folder of a causal language model",
        )
    state: dict[str, Tensor] = model.state_dict()
    return state


def _list_tensors(kind: str, names: Any) -> str:
    """Return how many tensors there are of a kind, and the first ones; "" for none."""
    listed = sorted(" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names or ())
    return (
        f"{len(listed)} {kind} ({', '.join(listed[:MAX_LISTED_TENSORS])}{', ...' * (len(listed) > MAX_LISTED_TENSORS)})"
        if listed
        else ""
    )


def save_transformers_weights(folder: Path, model: LanguageModel, state: dict[str, Tensor], shard_size: str) -> None:
    """Write the tensors of `state` as model*.safetensors of at most `shard_size`, under the names that published
    folders of this class have.
    """
    assert isinstance(model, TransformersModel)
    with TemporaryDirectory(dir=folder) as temporary:
        model.hf.save_pretrained(temporary, state_dict=state, max_shard_size=shard_size)
        for path in Path(temporary).glob("model*.safetensors*"):
            path.rename(folder / path.name)
