"""Types that the folders of data/ share: how examples are encoded, and encoded examples as the batches read them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


def sequences_per_row(data_format: str) -> int:
    """Return how many token sequences an encoded row has: 2 (chosen, rejected) for a preference, else 1."""
    return 2 if data_format == "preference" else 1


@dataclass(frozen=True)
class EncodingConfig:
    """All settings that decide which token ids the rows of a file become.

    Part of the key of the token store.
    """

    data_format: str  # text | chat | preference
    schema: str  # name in data.schemas.registry.SCHEMAS
    tokenizer: Path
    max_length: int
    too_long: str  # truncate | drop | split
    loss_on: str  # assistant | last_assistant | all
    on_bad_row: str  # error | skip
    system_prompts: tuple[str, ...] = ()
    system_prob: float = 0.0
    empty_think_prob: float = 0.0
    seed: int = 0  # of the two probabilities; 0 where both are 0, so that the seed of the run does not change the key

    def key(self, tokenizer_fingerprint: str) -> str:
        parts = dataclasses.asdict(self) | {"tokenizer": tokenizer_fingerprint}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class TokenSequence(NamedTuple):
    ids: np.ndarray  # int32 (n,), n <= max_length + 1: ids[:-1] is the model's input, ids[1:] are its targets
    # bool (n,): whether the prediction of ids[t] has loss, [0] is False; or float32: its weight in the loss, if one is
    # not 0 or 1
    loss_mask: np.ndarray


class EncodedRow(NamedTuple):
    sequences: tuple[TokenSequence, ...]  # one; (chosen, rejected) for a preference
    name: str  # file:line
