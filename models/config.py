"""Settings that models share, the registry of model families, and settings of adapters.

Imports no torch: settings are checked before it.

A model family is a module of families/ with its settings and config.json, and a `LanguageModel`; or a plugin with both:

    @register_model("rwkv")
    @dataclass
    class RwkvConfig(ModelConfig):
        head_size: int  # width of a head

        model_class = "my_package.Rwkv"
        hf_model_types = ("rwkv7",)

conf/model/*.yaml set family: rwkv and its values.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Optional, Self

from common.errors import UserError
from common.registry import Registry
from common.settings import IGNORED, CheckedSettings, at_least, one_of, settings_class, within

if TYPE_CHECKING:
    import torch

# recompute nothing, all but matmuls and attention, or whole layers
ACTIVATION_CHECKPOINTING_MODES = ("none", "selective", "full")

MAX_TENSORS = 100_000  # parameters of a model, each a tensor; the largest mixtures of experts in use have 70,000

MODELS: Registry[type[ModelConfig]] = Registry("model.family", "models.families", helpers=("hf_config",))
register_model = MODELS.register


class UnsupportedVariantError(UserError):
    """A family computes models of this model_type, but not with these values."""


class ModelSize(NamedTuple):
    parameters: int  # numbers; a tied weight counts once
    tensors: int  # of parameters


@settings_class
class ModelConfig(CheckedSettings):
    """Settings that every model has. Field names are those of a transformers config."""

    SECTION = "model"

    family: str  # a module of models/families/, or a family that a plugin registers
    name: str = field(metadata=IGNORED)  # name of the architecture, for reports
    vocab_size: int = at_least(1)  # tokens of the vocabulary (V)
    num_hidden_layers: int = at_least(1)  # layers
    max_position_embeddings: int = at_least(1)  # longest sequence (tokens)
    tie_word_embeddings: bool  # the output layer shares its weight with the embedding

    # module and name of the LanguageModel; imported when a model is created, because it imports torch
    model_class: ClassVar[str]
    hf_model_types: ClassVar[tuple[str, ...]]  # values of model_type in config.json that from_hf_config reads

    def size(self) -> ModelSize | None:
        """Return the size of the model from its settings alone; None if the family does not say before the model is
        built.
        """
        return None

    def check_memory(self) -> None:
        """Raise UserError if the weights in fp32, which are first created in host memory, cannot fit into it."""
        if (size := self.size()) is None:
            return
        from common.limits import machine_memory

        memory, needed = machine_memory(), 4 * size.parameters
        if size.tensors > MAX_TENSORS or needed > memory:
            problem = (
                f"{size.tensors:,} tensors, at most {MAX_TENSORS:,} are allowed"
                if size.tensors > MAX_TENSORS
                else f"{needed / 2**30:,.1f} GiB in fp32"
            )
            message = f"the model has {size.parameters:,} parameters, {problem}; this machine has {memory / 2**30:,.1f} GiB of memory"
            largest = f"model.num_hidden_layers={self.num_hidden_layers} model.vocab_size={self.vocab_size}"
            raise UserError(
                message, largest, "choose a smaller model, e.g. model=tiny; python runner/train.py --help lists them"
            )

    @property
    def has_dynamic_shapes(self) -> bool:
        """Whether shapes inside a layer depend on the data: train.compile=auto does not compile such a model."""
        return False

    @property
    def has_attention_dropout(self) -> bool:
        """Whether attention drops probabilities: of packed rows on a CPU it is slower compiled."""
        return False

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise UserError if the model cannot be computed on this device in this dtype of autocast."""

    def mathematics(self) -> dict[str, Any]:
        """Return the settings that the logits of given weights depend on."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("name", "max_position_embeddings")
        }

    def training_warnings(self) -> list[str]:
        """Return what a user who trains this model should know, one line each."""
        return []

    def to_hf_config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        raise NotImplementedError

    @classmethod
    def from_hf_config(cls, raw: dict[str, Any], path: Path) -> Self:
        """Return the settings in a config.json.

        Raises UserError for a variant that the family does not have; KeyError or TypeError for a field that is missing
        or of another type. `path`: the file.
        """
        raise NotImplementedError


@settings_class
class LoraConfig(CheckedSettings):
    """Low-rank adapters (https://arxiv.org/abs/2106.09685): W x + scale * B A x."""

    SECTION = "stage.lora"

    rank: int = at_least(1, 8)  # rows of A and columns of B
    alpha: float = within("(0, inf)", 16, "a positive number")  # output scale, times 1 / rank
    dropout: float = within("[0, 1)", 0.1)  # on the adapter's input; probability
    # layers with an adapter: names, ends of paths (q_proj, 0.mlp.up_proj), re:PATTERN; [all-linear]: all but the output
    # layer
    targets: list[str]
    rslora: bool  # scale alpha / sqrt(rank) in place of alpha / rank: larger ranks learn as fast as small ones (rsLoRA)
    dora: bool  # train the length of each row of the weight, too (DoRA); a step takes longer
    # nf4: the frozen linear layers have 4 bits per weight (QLoRA), needs bitsandbytes; null: fp32
    quantize: Optional[str] = one_of("nf4")
    # init_from is an adapter: train it on, with its rank, alpha and targets; false: merge it into the model, train a
    # new one
    continue_adapter: bool

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
