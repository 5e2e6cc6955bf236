"""Settings of the group `data`: where examples are read from and how they become token sequences.

Imports neither torch nor numpy.
"""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any, Optional

from common.errors import UserError
from common.settings import (
    IGNORED,
    CheckedSettings,
    Limit,
    as_typed,
    at_least,
    check_choice,
    limited,
    one_of,
    settings_class,
    within,
)
from data.schemas.registry import SCHEMAS, check_columns

LOSS_TOKENS = ("assistant", "last_assistant", "all")
TEXT_UNITS = ("file", "line")
TURNS = ("strict", "merge")
VAL_PATHS = Limit(
    "auto, a path, or paths (not auto) of named sets (without /)",
    lambda value: (
        all(isinstance(path, str | None) and path != "auto" and "/" not in str(name) for name, path in value.items())
        if isinstance(value, dict)
        else isinstance(value, str | None)
    ),
    "{law: a.jsonl, chat: b.jsonl}",
)


def resolved_too_long(too_long: str, data_format: str) -> str:
    """Return truncate, drop or split for data.too_long."""
    return ("split" if data_format == "text" else "truncate") if too_long == "auto" else too_long


def check_max_length(max_length: int, positions: int) -> None:
    """Require that the model has a position for every token of an example."""
    if max_length > positions:
        raise UserError(
            f"data.max_length must be at most model.max_position_embeddings={positions}, got {max_length}",
            f"data.max_length={max_length}",
            f"data.max_length={positions}",
        )


@settings_class
class DataConfig(CheckedSettings):
    SECTION = "data"

    name: str = field(metadata=IGNORED)  # name of the group file in conf/data/
    # training data: a file, a glob, a folder, hub:owner/name[@config][:split], or a list of these
    path: Any = field(metadata=IGNORED)
    # relative share of each entry of data.path in an epoch, e.g. [3,1]; null: each row once
    weights: Optional[list[float]]
    # columns of your files, e.g. {prompt: question}: the field prompt is the column question; {label: null}: not read
    columns: Any = field(metadata=IGNORED)
    # of text files that are not UTF-8, e.g. gb18030, cp1252; null: detected
    encoding: Optional[str] = field(metadata=IGNORED)
    # a row of a .txt or .md file: file (long ones in parts), or line
    text_unit: str = one_of(*TEXT_UNITS, resume=IGNORED)
    # turns of one role in a row, a first turn of the assistant: strict (refused) or merge (joined, kept)
    turns: str = one_of(*TURNS, resume=IGNORED)
    schema: Optional[str] = field(metadata=IGNORED)  # row schema, e.g. "openai messages"; null: detected per file
    # validation data, as data.path; auto: files named so (validation-*, X_val.jsonl by X.jsonl); null: none;
    # {law: a.jsonl, chat: b.jsonl}: named sets, the first of which decides the best weights
    val_path: Any = limited(VAL_PATHS, IGNORED)
    # share of the rows held out where data.val_path gives none, in [0, 1); auto: 0.01, at least 10 rows, of fewer than
    # 50 a fifth
    val_fraction: Any
    # training rows with the tokens of a validation row: drop, keep, or auto: drop with data.val_fraction, keep with
    # data.val_path
    val_duplicates: str = one_of("auto", "drop", "keep")
    # auto (that of init_from's weights; from scratch the sample's), minimind (from scratch MiniMind's), or a folder
    tokenizer: str = field(metadata=IGNORED)
    # longest sequence (input tokens per example); with packing, the length of a packed sequence
    max_length: int = at_least(2, 512)
    # longer examples: truncate, drop, split (texts only), or auto: split texts, truncate conversations
    too_long: str = one_of("auto", "truncate", "drop", "split")
    # a row that cannot be used: error (stop at the first) or skip (count and continue)
    on_bad_row: str = one_of("error", "skip", resume=IGNORED)
    # with on_bad_row=skip: largest fraction of bad rows per file
    max_bad_fraction: float = within("[0, 1]", 0.1, resume=IGNORED)
    # tokens with loss in a conversation: assistant (all its messages), last_assistant, or all
    loss_on: str = one_of(*LOSS_TOKENS)
    # best_fit: several examples per sequence, separated by the document mask; none: one example per sequence
    packing: str = one_of("none", "best_fit")
    group_by_length: bool  # batches of examples of similar length, to reduce padding; needs packing=none
    system_prompts: list[str]  # candidates for the random system message of a conversation that has none
    system_prob: float = within("[0, 1]", 0.1)  # probability of adding one of data.system_prompts
    # probability of starting answers without reasoning with an empty think block
    empty_think_prob: float = within("[0, 1]", 0.1)
    cache: str = field(metadata=IGNORED)  # folder of the token stores, shared by all runs
    # processes that prepare batches in advance; 0: the training process does it
    num_workers: int = at_least(0, 2, resume=IGNORED)
    # seconds without progress after which a wait for a batch, or for a tokenizing process, fails; 0: no limit
    worker_timeout: float = at_least(0, 300, resume=IGNORED)

    @property
    def paths(self) -> list[str]:
        return list(self.path) if isinstance(self.path, (list, tuple)) else [self.path]

    @property
    def val_paths(self) -> dict[str, str]:
        """The path of each validation set by its name, which is "" where data.val_path names none."""
        sets = self.val_path if isinstance(self.val_path, dict) else {"": self.val_path}
        named = {as_typed(name): path for name, path in sets.items()}  # YAML reads 2023 and true as other types
        return {name: path for name, path in named.items() if path}

    def __post_init__(self) -> None:
        from data.sources.files import ReadOptions

        super().__post_init__()
        if not self.paths or not all(isinstance(path, str) and path for path in self.paths):
            raise UserError(
                "data.path must name a file, a folder, or a list of these",
                f"data.path={self.path}",
                "e.g. data.path=[a.jsonl,b.parquet]",
            )
        if self.weights is not None and len(self.weights) != len(self.paths):
            message = f"data.weights must have one number per entry of data.path, got {len(self.weights)} for {len(self.paths)}"
            raise UserError(
                message, f"data.weights={self.weights}", f"e.g. data.weights=[{','.join(['1'] * len(self.paths))}]"
            )
        if not all(0 < weight < float("inf") for weight in self.weights or ()):
            raise UserError(
                f"data.weights must be positive numbers, got {self.weights}",
                f"data.weights={self.weights}",
                "remove the entry from data.path instead",
            )
        if self.schema is not None:
            check_choice("data.schema", self.schema, SCHEMAS)
        if self.columns:
            check_columns(self.columns)
        ReadOptions.of(self)  # refuses an unknown encoding
        if self.val_fraction != "auto" and not (
            isinstance(self.val_fraction, int | float) and 0 <= self.val_fraction < 1
        ):
            message = f"data.val_fraction must be auto or in [0, 1), got {self.val_fraction}"
            raise UserError(message, f"data.val_fraction={self.val_fraction}", "e.g. data.val_fraction=0.02")
        if self.group_by_length and self.packing != "none":
            raise UserError(
                f"data.group_by_length needs data.packing=none, got {self.packing}",
                "data.group_by_length=true",
                "data.packing=none",
            )
        if self.system_prob and not self.system_prompts:
            raise UserError(
                "data.system_prob needs data.system_prompts, which is empty",
                f"data.system_prob={self.system_prob}",
                'data.system_prompts=["..."]',
            )


@settings_class
class TokenizerConfig(CheckedSettings):
    """Settings of runner/tokenizer.py."""

    path: list[str]  # files, globs, folders, hub:owner/name; a file named twice counts double
    to: Optional[str]  # folder to write the tokenizer to; null with tokenizer=DIR
    vocab_size: int  # number of tokens, at most
    max_lines: int = at_least(1, 500000)  # rows read from each file, at most
    tokenizer: Optional[str]  # folder of a tokenizer to evaluate instead of training one
    compare: Optional[str]  # folder of a second tokenizer to evaluate on the same rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise UserError(
                "path must name at least one file, got none", "path=[]", "e.g. path=[text.jsonl,chats.jsonl]"
            )
        if self.to and self.tokenizer:
            raise UserError(
                "to= trains a tokenizer, tokenizer= evaluates one: they exclude each other",
                f"to={self.to} tokenizer={self.tokenizer}",
                "remove one",
            )
        if self.tokenizer is None and (not self.to or (Path(self.to).exists() and not Path(self.to).is_dir())):
            fix = "e.g. to=my_tokenizer, it is created if missing; or evaluate an existing one: tokenizer=DIR"
            raise UserError(f"to must be a folder, got {self.to or 'none'}", f"to={self.to}", fix)

    @property
    def unread(self) -> dict[str, str]:
        return {"vocab_size": "to=my_tokenizer"} if self.tokenizer else {}
