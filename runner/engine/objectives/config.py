"""Section `stage` of the config: settings of all stages, the registry of objectives, and next-token
prediction: pretraining, SFT and LoRA differ in which tokens have a label and which weights are trained.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Optional

from common.errors import UserError
from common.registry import Registry
from common.settings import CHANGES_TRAINING, IGNORED, CheckedSettings, one_of, settings_class, within
from models.config import LoraConfig
from runner.engine.objectives.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.batching.batch import Batch
    from models.language_model import LanguageModel
    from runner.engine.objectives.objective import LossSums

DATA_FORMATS = ("text", "chat", "preference")

OBJECTIVES: Registry[type[StageConfig]] = Registry(
    "stage.objective", "runner.engine.objectives", helpers=("config", "objective")
)
register_objective = OBJECTIVES.register


@settings_class
class StageConfig(CheckedSettings):
    """Settings that every stage has."""

    SECTION = "stage"

    name: str  # name of the stage, for init_from=auto and reports
    data_format: str = one_of(*DATA_FORMATS)  # format of the examples: text, chat or preference
    objective: str  # a registered objective, e.g. next_token; plugins register others
    lora: Optional[LoraConfig]  # train adapters of these settings; null: train all parameters
    # init_from=auto takes the newest finished run of this stage; null: random weights
    init_from_stage: Optional[str] = field(metadata=IGNORED)

    data_formats: ClassVar[tuple[str, ...]] = DATA_FORMATS  # those that the objective reads
    needs_reference: ClassVar[bool] = False  # the objective compares with the weights that the run starts from

    def __post_init__(self) -> None:
        super().__post_init__()
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
@settings_class
class NextTokenConfig(StageConfig):
    """Evaluations have the plain cross-entropy."""

    # share of the loss that is the mean over the vocabulary of -log p, as torch's cross_entropy has it
    label_smoothing: float = within("[0, 1)", 0.1, resume=CHANGES_TRAINING, default=0.0)
    # weight of the squared logsumexp of the logits, which keeps them from growing, e.g. 1e-4
    z_loss: float = within("[0, inf)", "1e-4", resume=CHANGES_TRAINING, default=0.0)
    # NEFTune: uniform noise of up to this over sqrt(tokens of the document x hidden size) on embeddings, e.g. 5
    neftune_alpha: float = within("[0, inf)", 5, resume=CHANGES_TRAINING, default=0.0)

    data_formats = ("text", "chat")

    @property
    def has_penalties(self) -> bool:
        return bool(self.label_smoothing or self.z_loss)

    def build_objective(self, model: LanguageModel) -> Objective:
        if self.has_penalties:
            model.use_penalties(self.label_smoothing, self.z_loss)
        return NextToken(model.input_layer if self.neftune_alpha else None, self.neftune_alpha)


@dataclass(eq=False)
class NextToken(Objective):
    """Cross-entropy, summed over the tokens with a label times their weight; the count is the sum of the weights.

    In training the output of `noisy_layer` gets the noise of NEFTune (https://arxiv.org/abs/2310.05914).
    """

    noisy_layer: nn.Module | None = None
    neftune_alpha: float = 0.0

    def count(self, batch: Batch) -> float:
        return batch.num_supervised_tokens if batch.loss_weights is None else batch.loss_weights.double().sum().item()

    def loss(self, model: nn.Module, batch: Batch) -> LossSums:
        from data.batching.batch import IGNORE_INDEX

        weights = batch.loss_weights
        with self.noise(batch):
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

    def noise(self, batch: Batch) -> AbstractContextManager:
        if self.noisy_layer is None or not self.noisy_layer.training:
            return nullcontext()
        import torch

        bound = self.neftune_alpha * batch.lengths.rsqrt()  # (S,)
        documents = batch.document_ids
        bound = bound[:, None] if documents is None else bound[documents.clamp(min=0)]  # (R, 1 or T)

        def add_noise(_: nn.Module, __: object, x: Tensor) -> Tensor:
            noise = torch.empty_like(x).uniform_(-1, 1)
            return x + noise * (bound / math.sqrt(x.shape[-1])).unsqueeze(-1).to(x.dtype)

        return self.noisy_layer.register_forward_hook(add_noise)

    def eval_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}  # e^710 overflows

    def uniform_loss(self, vocab_size: int) -> float | None:
        return math.log(vocab_size)
