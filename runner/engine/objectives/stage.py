"""A stage is three choices: which rows, which objective, which parameters learn. The loop knows none of their names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from common.errors import UserError
from models.config import LoraConfig

if TYPE_CHECKING:
    from models.decoder import Decoder
    from runner.engine.objectives.objective import Objective

DATA_FORMATS = ("text", "chat", "preference")
OBJECTIVES = ("next_token", "dpo")


@dataclass
class StageConfig:
    name: str
    data_format: str  # text | chat | preference
    objective: str  # next_token | dpo
    beta: float  # dpo: how strongly the policy is held to its reference
    lora: Optional[LoraConfig]  # null: every parameter learns
    init_from_stage: Optional[str]  # the stage whose newest finished run init_from=auto starts from

    def __post_init__(self) -> None:
        if self.data_format not in DATA_FORMATS:
            raise UserError("unknown rows", f"stage.data_format={self.data_format}", f"choose one of {', '.join(DATA_FORMATS)}")
        if self.objective not in OBJECTIVES:
            raise UserError("unknown objective", f"stage.objective={self.objective}", f"choose one of {', '.join(OBJECTIVES)}")
        if (self.data_format == "preference") != (self.objective == "dpo"):
            raise UserError("preference rows and the dpo objective go together", f"stage.data_format={self.data_format} stage.objective={self.objective}", "use stage=dpo")
        if not 0 < self.beta < math.inf:
            raise UserError("beta is a positive number", f"stage.beta={self.beta}", "choose e.g. 0.1")


def build_objective(stage: StageConfig, model: Decoder) -> Objective:
    """Fit `model` to the stage in place (adapters, what is frozen) and return the objective to lower."""
    import copy
    from contextlib import nullcontext

    from models.lora import add_lora, disable_adapters
    from runner.engine.objectives.dpo import Dpo
    from runner.engine.objectives.next_token import NextToken

    if stage.lora is not None:
        add_lora(model, stage.lora)
    if stage.objective == "next_token":
        return NextToken()
    if stage.lora is not None:  # the policy without its adapters is the reference: no second copy is held
        return Dpo(stage.beta, model, lambda: disable_adapters(model))
    return Dpo(stage.beta, copy.deepcopy(model).requires_grad_(False).eval(), nullcontext)
