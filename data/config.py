"""Where the text is and how it becomes rows. No torch here: the words must be checkable at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional


@dataclass
class DataConfig:
    name: str
    path: str  # a JSONL file, or a JSON array
    val_path: Optional[str]  # held-out rows from a file of their own ...
    val_fraction: float  # ... or this share of `path`; both empty: no evaluation
    tokenizer: str  # a folder with tokenizer.json
    max_length: int  # tokens a row feeds to the model at most
    num_workers: int  # processes that build batches ahead of time; 0: the training process does it

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError("a row needs a token to read and one to predict", f"data.max_length={self.max_length}", "choose at least 2")
        if not 0 <= self.val_fraction < 1:
            raise ValueError("a share of the rows lies in [0, 1)", f"data.val_fraction={self.val_fraction}", "choose e.g. 0.02")
        if self.val_path and self.val_fraction:
            raise ValueError(
                "two sources of held-out rows",
                f"data.val_path={self.val_path} data.val_fraction={self.val_fraction}",
                "give one of them: data.val_fraction=0 or data.val_path=null",
            )
        if self.num_workers < 0:
            raise ValueError("a count cannot be negative", f"data.num_workers={self.num_workers}", "choose 0 or more")
