"""Comparison of an exported model with the one that was trained: log-probabilities and token ids of texts in several languages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from data.tokenize.tokenizer import Tokenizer

TEXTS = (
    "The lake lies north of the old mill, 12 km away.",
    "米娜住在湖边的小屋里，她养了九只灰山羊。",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # m²",
    "Émile lächelt: 👩‍🔬 🐐 «naïve café» — ½ ≠ 0.5\t\u00a0\r\n  end",
)
MAX_DIFFERENCE = 1e-4  # of a log-probability between the model with rounded weights and what was read again: fp32 rounding
MAX_MERGE_DIFFERENCE = 1e-3  # of a log-probability that merging an adapter into fp32 weights may change


def log_probs(model: Any, tokenizer: Tokenizer) -> list[Tensor]:
    """Return the log-probabilities of all tokens at each position of TEXTS, (T, V) each. `model`: a LanguageModel, or a reader that is called like one."""
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


def compare_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if transformers reads other token ids or other control tokens from the tokenizer in `folder`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        reference = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the class that tokenizer_config.json names raises what it likes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        fix = "remove tokenizer_class from its tokenizer_config.json; or verify=false"
        raise UserError(f"transformers cannot read the tokenizer: {reason}", str(tokenizer.folder), fix) from error
    expected = [tokenizer.encode(text) for text in TEXTS]
    if _token_ids(reference) != expected:
        generic = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        if _token_ids(generic) != expected:
            raise UserError("transformers reads other token ids from the written tokenizer", str(tokenizer.folder), "report this with the tokenizer")
        # Version 5 has its own class for some model types, whatever tokenizer_config.json names, e.g. for qwen2.
        message = f"AutoTokenizer reads other token ids: for this model_type it takes {type(reference).__name__}, which ignores parts of tokenizer.json"
        fix = "verify=false writes the folder all the same, then read it with PreTrainedTokenizerFast.from_pretrained; or format=gguf"
        raise UserError(message, str(tokenizer.folder), fix)
    own = {role: tokenizer.named_tokens.get(f"{role}_token") for role in ("bos", "eos")}
    read = {role: getattr(reference, f"{role}_token") for role in own}
    if read != own:
        raise UserError(f"transformers reads the control tokens {read}, expected {own}", str(tokenizer.folder), "report this with the tokenizer")


def _token_ids(reference: Any) -> list[list[int]]:
    return [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
