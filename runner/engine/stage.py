"""A stage is three choices: which rows, which objective, which parameters learn. The loop knows none of their names."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from models.config import LoraConfig

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
        if self.beta <= 0:
            raise ValueError("beta is a positive number", f"stage.beta={self.beta}", "choose e.g. 0.1")
