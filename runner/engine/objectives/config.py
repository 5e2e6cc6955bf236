"""Section `stage` of the config: settings of all stages, the registry and the interface of objectives, and
next-token prediction: pretraining, SFT and LoRA differ in which tokens have a label and which weights are trained.

A stage is three choices: the data format, the objective, and which parameters are trained. An objective gives sums over
countable items, so that micro-batches and ranks add up exactly. It is one file: `kto.py` in this folder, or a module
that the user names in `plugins=[...]`, with its settings and an Objective:

    @register_objective("kto")
    @dataclass
    class KtoConfig(StageConfig):
        beta: float  # deviation from the reference model

        data_formats = ("preference",)
        needs_reference = True

        def build_objective(self, model: LanguageModel) -> Objective:
            return Kto(self.beta, Reference.of(model, self.lora))

conf/stage/kto.yaml sets objective: kto and its values; without such a file, every field has a default in the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Optional

from common.errors import UserError
from common.registry import Registry
from common.settings import IGNORED, check_choice
from models.config import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.batching.batch import Batch
    from models.language_model import LanguageModel

    LossSums = dict[str, Tensor]  # scalars; "loss" is differentiated, the others are logged

DATA_FORMATS = ("text", "chat", "preference")

OBJECTIVES: Registry[type[StageConfig]] = Registry("stage.objective", "runner.engine.objectives", helpers=("config",))
register_objective = OBJECTIVES.register


@dataclass
class Reference:
    """The model as it was before this training, and the context in which to call it."""

    model: LanguageModel
    entered: Callable[[], AbstractContextManager] = nullcontext

    @classmethod
    def of(cls, model: LanguageModel, lora: LoraConfig | None) -> Reference:
        """Return a frozen copy of `model`; with adapters, the model itself while they are disabled, which needs no
        memory.
        """
        import copy

        from models.lora import disable_adapters

        if lora is not None:
            return cls(model, lambda: disable_adapters(model))
        return cls(copy.deepcopy(model).requires_grad_(False).eval())


class Objective:
    """What a stage minimizes.

    The loss of a step is the sum of `loss()` over its micro-batches, divided by the sum of `count()`.
    """

    reference: Reference | None = None

    def count(self, batch: Batch) -> float:
        """Return the number of items in the batch (e.g. pairs, or tokens with a label, each counted as its weight),
        before the forward pass.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        """Return the loss, and metrics to log with it, each summed over the items."""
        raise NotImplementedError

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return further metrics of an evaluation, from the sums of `loss()` divided by their count."""
        return {}

    def uniform_loss(self, vocab_size: int) -> float | None:
        """Return the loss of a model that gives every token the same probability, or None if it is no measure of
        divergence.
        """
        return None

    @property
    def extra_models(self) -> list[LanguageModel]:
        """Models beside the trained one that the objective calls."""
        is_copy = self.reference is not None and not any(p.requires_grad for p in self.reference.model.parameters())
        return [self.reference.model] if self.reference is not None and is_copy else []

    @property
    def frozen_parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers that the objective reads and the training does not change: no checkpoint has them."""
        from models.language_model import stored_tensors

        return (
            {}
            if self.reference is None
            else {
                name: tensor
                for name, tensor in stored_tensors(self.reference.model).items()
                if not tensor.requires_grad
            }
        )


def mask_dummy_batch(batch: Batch, sums: LossSums) -> LossSums:
    """Return zeros for a dummy batch: it is computed because collectives need every rank, and does not count."""
    return sums if batch.names else {name: part * 0 for name, part in sums.items()}


@dataclass
class StageConfig:
    """Settings that every stage has."""

    name: str  # name of the stage, for init_from=auto and reports
    data_format: str  # format of the examples: text, chat or preference
    objective: str  # a module of runner/engine/objectives/, or an objective that a plugin registers
    lora: Optional[LoraConfig]  # train adapters of these settings; null: train all parameters
    # init_from=auto takes the newest finished run of this stage; null: random weights
    init_from_stage: Optional[str] = field(metadata=IGNORED)

    data_formats: ClassVar[tuple[str, ...]] = DATA_FORMATS  # those that the objective reads
    needs_reference: ClassVar[bool] = False  # the objective compares with the weights that the run starts from

    def __post_init__(self) -> None:
        check_choice("stage.data_format", self.data_format, DATA_FORMATS)
        if self.data_format not in self.data_formats:
            raise UserError(
                f"stage.objective={self.objective} needs stage.data_format {' or '.join(self.data_formats)}, got {self.data_format}",
                f"stage.data_format={self.data_format} stage.objective={self.objective}",
                f"stage.data_format={self.data_formats[0]}, or choose another stage",
            )
        if self.lora is not None and self.lora.continue_adapter and self.needs_reference:
            message = "the reference of this objective is the model without its adapter, but the run would start with the adapter of init_from"
            raise UserError(
                message,
                "stage.lora.continue_adapter=true",
                "stage.lora.continue_adapter=false merges that adapter and trains a new one",
            )

    def build_objective(self, model: LanguageModel) -> Objective:
        """`model` has its adapters already."""
        raise NotImplementedError


def prepare_stage(stage: StageConfig, model: LanguageModel, init_from: str = "scratch") -> Objective:
    """Add the stage's adapters to `model` in place, new ones or those of `init_from`, and return the objective to
    minimize.
    """
    if stage.lora is not None:
        from models.formats.load import add_run_adapter

        add_run_adapter(model, stage.lora, init_from)
    return stage.build_objective(model)


@register_objective("next_token")
@dataclass
class NextTokenConfig(StageConfig):
    data_formats = ("text", "chat")

    def build_objective(self, model: LanguageModel) -> Objective:
        return NextToken()


class NextToken(Objective):
    """Cross-entropy, summed over the tokens with a label times their weight; the count is the sum of the weights."""

    def count(self, batch: Batch) -> float:
        return batch.num_supervised_tokens if batch.loss_weights is None else batch.loss_weights.double().sum().item()

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        from data.batching.batch import IGNORE_INDEX

        weights = batch.loss_weights
        out = model(**batch.inputs, reduction="sum" if weights is None else "none")
        loss = out.nll if weights is None else (out.nll * weights).sum()
        if out.aux_loss is None:
            return {"loss": loss}
        # Weighted with its number of labels, so that dividing by all labels gives the mean over tokens of both losses.
        aux = (
            out.aux_loss
            * batch.sum_per_document((batch.labels != IGNORE_INDEX).float() if weights is None else weights)
        ).sum()
        return {"loss": loss + aux, "aux_loss": aux}

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # e^710 overflows

    def uniform_loss(self, vocab_size: int) -> float | None:
        return math.log(vocab_size)
