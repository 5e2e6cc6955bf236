"""A stage is three choices: which rows, which objective, which parameters learn. The loop knows none of their names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from models.config import LoraConfig

if TYPE_CHECKING:
    from models.decoder import Decoder
    from runner.engine.objective import Objective

ROWS = ("text", "chat", "preference")
OBJECTIVES = ("next_token", "dpo")


@dataclass
class StageConfig:
    name: str
    rows: str  # text | chat | preference
    objective: str  # next_token | dpo
    beta: float  # dpo: how strongly the policy is held to its reference
    lora: Optional[LoraConfig]  # null: every parameter learns
    after: Optional[str]  # the stage whose newest finished run init_from=auto starts from
    prompts: list[str]  # what the model is asked every train.sample_every steps

    def __post_init__(self) -> None:
        if self.rows not in ROWS:
            raise ValueError("unknown rows", f"stage.rows={self.rows}", f"choose one of {', '.join(ROWS)}")
        if self.objective not in OBJECTIVES:
            raise ValueError("unknown objective", f"stage.objective={self.objective}", f"choose one of {', '.join(OBJECTIVES)}")
        if (self.rows == "preference") != (self.objective == "dpo"):
            raise ValueError("preference rows and the dpo objective go together", f"stage.rows={self.rows} stage.objective={self.objective}", "use stage=dpo")
        if not 0 < self.beta < math.inf:
            raise ValueError("beta is a positive number", f"stage.beta={self.beta}", "choose e.g. 0.1")


def prepare(stage: StageConfig, model: Decoder) -> Objective:
    """Fit `model` to the stage in place (adapters, what is frozen) and return the objective to lower."""
    import copy
    from contextlib import nullcontext

    from models.lora import adapters_off, add_lora
    from runner.engine.objective import Dpo, NextToken

    if stage.lora is not None:
        add_lora(model, stage.lora)
    if stage.objective == "next_token":
        return NextToken()
    if stage.lora is not None:  # the policy without its adapters is the reference: no second copy is held
        return Dpo(stage.beta, model, lambda: adapters_off(model))
    return Dpo(stage.beta, copy.deepcopy(model).requires_grad_(False).eval(), nullcontext)
