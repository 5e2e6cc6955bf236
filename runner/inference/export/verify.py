"""Comparison of an exported model with the one that was trained: log-probabilities and token ids of texts in several languages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from data.tokenize.tokenizer import Tokenizer
    from models.language_model import LanguageModel

TEXTS = (
    "The lake lies north of the old mill, 12 km away.",
    "米娜住在湖边的小屋里，她养了九只灰山羊。",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # m²",
    "Émile lächelt: 👩‍🔬 🐐 «naïve café» — ½ ≠ 0.5\t\u00a0\r\n  end",
)
MAX_DIFFERENCE = 1e-4  # of a log-probability between the model with rounded weights and what was read again: fp32 rounding
MAX_MERGE_DIFFERENCE = 1e-3  # of a log-probability that merging an adapter into fp32 weights may change


def log_probs(model: LanguageModel, tokenizer: Tokenizer) -> list[Tensor]:
    """Return the log-probabilities of all tokens at each position of TEXTS, (T, V) each."""
    import torch

    with torch.inference_mode():
        rows = [torch.tensor([[*tokenizer.bos_ids, *tokenizer.encode(text)][: model.cfg.max_position_embeddings]]) for text in TEXTS]
        logits = [model(row).logits for row in rows]
    return [each[0].float().log_softmax(-1) for each in logits if each is not None]


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def check_difference(difference: float, limit: float, what: str, setting: str) -> None:
    """Raise UserError if `difference` is above `limit` or not a number."""
    if not difference <= limit:
        raise UserError(
            f"{what} differs from the trained model by {difference:.2g} in a log-probability, allowed are {limit:.0e}",
            setting,
            "report this; nothing was written",
        )


def check_token_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if transformers reads other token ids from the tokenizer in `folder`."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for text in TEXTS:
        if reference(text, add_special_tokens=False)["input_ids"] != tokenizer.encode(text):
            raise UserError("transformers reads other token ids from the written tokenizer", str(folder), "report this with the tokenizer")
