"""Where the text is and how it becomes rows. No torch here: the words must be checkable at once."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Optional

from common.errors import UserError
from data.schemas.schemas import SCHEMAS

TOO_LONG_CHOICES = ("auto", "truncate", "drop", "split")
ON_BAD_ROW_CHOICES = ("error", "skip")
LOSS_ON_CHOICES = ("assistant", "last_assistant", "all")
PACKING_CHOICES = ("none", "pack")


@dataclass
class DataConfig:
    name: str
    path: Any  # a file, a glob, a folder, hub:owner/name, or a list of these
    weights: Optional[list[float]]  # of a list of paths: their shares of the rows of an epoch; null: every row once
    shape: Optional[str]  # of the rows; null: recognised file by file
    val_path: Optional[str]  # held-out rows; auto: X_val.jsonl beside X.jsonl, where there is one
    val_fraction: float  # where there is no such file, this share of every file is held out; 0: no evaluation
    tokenizer: str  # a folder with tokenizer.json
    max_length: int  # tokens a sequence feeds to the model at most, and with packing those of a window
    too_long: str  # auto: split a text, truncate a conversation
    on_bad_row: str  # error: stop at the first; skip: count and go on
    max_bad_fraction: float  # skip: more bad rows than this share stop the run all the same
    train_on: str  # which turns of a conversation carry loss
    packing: str  # pack: several rows in one window, each seeing only itself
    group_by_length: bool  # without packing: rows of like length in a step
    system_prompts: list[str]  # one of these is put in front of a conversation without a system message ...
    system_prob: float  # ... with this probability
    empty_think_prob: float  # an answer without reasoning gets an empty think block
    cache: str  # where token stores are kept between runs
    num_workers: int  # processes that build batches ahead of time; 0: the training process does it

    @property
    def paths(self) -> list[str]:
        return list(self.path) if isinstance(self.path, (list, tuple)) else [self.path]

    def __post_init__(self) -> None:
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise UserError("no text to train on", f"data.path={self.path}", "name a file, a folder, or a list: data.path=[a.jsonl,b.parquet]")
        self._check_weights()
        if self.shape is not None and self.shape not in SCHEMAS:
            near = difflib.get_close_matches(self.shape, SCHEMAS, n=1)
            raise UserError("no such shape of rows", f"data.shape={self.shape}", f"did you mean {near[0]}?" if near else f"choose one of {', '.join(SCHEMAS)}")
        for word, options in {"too_long": TOO_LONG_CHOICES, "on_bad_row": ON_BAD_ROW_CHOICES, "train_on": LOSS_ON_CHOICES, "packing": PACKING_CHOICES}.items():
            if getattr(self, word) not in options:
                raise UserError(f"unknown value of data.{word}", f"data.{word}={getattr(self, word)}", f"choose one of {', '.join(options)}")
        if self.max_length < 2:
            raise UserError("a row needs a token to read and one to predict", f"data.max_length={self.max_length}", "choose at least 2")
        if not 0 <= self.val_fraction < 1:
            raise UserError("a share of the rows lies in [0, 1)", f"data.val_fraction={self.val_fraction}", "choose e.g. 0.02")
        for word in ("max_bad_fraction", "system_prob", "empty_think_prob"):
            if not 0 <= getattr(self, word) <= 1:
                raise UserError("a probability or a share lies in [0, 1]", f"data.{word}={getattr(self, word)}", "choose e.g. 0.1")
        if self.group_by_length and self.packing == "pack":
            raise UserError("packed windows are all of one length", "data.group_by_length=true", "add data.packing=none")
        if self.system_prob and not self.system_prompts:
            raise UserError("there is no system prompt to choose from", f"data.system_prob={self.system_prob}", 'add data.system_prompts=["..."]')
        if self.num_workers < 0:
            raise UserError("a count cannot be negative", f"data.num_workers={self.num_workers}", "choose 0 or more")

    def _check_weights(self) -> None:
        if self.weights is None:
            return
        if len(self.weights) != len(self.paths):
            raise UserError(
                f"{len(self.weights)} weights for {len(self.paths)} paths", f"data.weights={self.weights}", "give one weight for each path, in their order"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise UserError("a weight is a positive number", f"data.weights={self.weights}", "leave a path out instead of giving it 0")
