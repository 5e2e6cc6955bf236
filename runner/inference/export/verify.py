"""Comparison of an exported model with the trained one.

Compared are log-probabilities and token ids of texts in several languages.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from runner.inference.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

    from data.tokenize.tokenizer import Tokenizer

TEXTS = (
    "The lake lies north of the old mill, 12 km away.",
    "米娜住在湖边的小屋里，她养了九只灰山羊。",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # m²",
    "Émile lächelt: 👩‍🔬 🐐 «naïve café» — ½ ≠ 0.5\t\u00a0\r\n  end",
)
# of a log-probability between the model with rounded weights and what was read again: fp32 rounding
MAX_DIFFERENCE = 1e-4
MAX_MERGE_DIFFERENCE = 1e-3  # of a log-probability that merging an adapter into fp32 weights may change


def rounded_log_probs(source: LoadedModel, dtype: str) -> list[Tensor]:
    """Round the weights and buffers in place as a file in `dtype` holds them; return the `log_probs` with these."""
    import torch

    for tensor in source.model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(getattr(torch, dtype)))
    return log_probs(source.model, source)


def log_probs(model: Any, source: LoadedModel) -> list[Tensor]:
    """Return the log-probabilities of all tokens at each position of TEXTS, (T, V) each.

    `model`: a LanguageModel, or a model of transformers.
    """
    import torch

    longest = source.model.cfg.max_position_embeddings
    with torch.inference_mode():
        logits = [model(torch.tensor([source.encode_text(text)[:longest]])).logits for text in TEXTS]
    return [each[0].float().log_softmax(-1) for each in logits]


def compare_model(model: Any, expected: list[Tensor], source: LoadedModel, how: str, to: str) -> str:
    """Compare the log-probabilities of a model that was read from the written files. Raises UserError."""
    difference = _difference(log_probs(model, source), expected, MAX_DIFFERENCE, f"what was {how}", f"to={to}")
    return f"{how}: largest difference of a log-probability {difference:.1g}"


def compare_merged(source: LoadedModel, before: list[Tensor], run: str) -> str:
    after = log_probs(source.model, source)
    difference = _difference(after, before, MAX_MERGE_DIFFERENCE, "the merged model", f"run={run}")
    return f"merging changed a log-probability by at most {difference:.1g}"


def _difference(one: list[Tensor], other: list[Tensor], limit: float, what: str, setting: str) -> float:
    """Return the largest difference. Raises UserError if it is above `limit` or not a number."""
    difference = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    if not difference <= limit:
        raise UserError(
            f"{what} differs from the trained model by {difference:.2g} in a log-probability, allowed are {limit:.0e}",
            setting,
            "report this; nothing was written",
        )
    return difference


def compare_with_transformers(folder: Path, expected: list[Tensor], source: LoadedModel, to: str) -> list[str]:
    """Compare the model and the tokenizer in `folder` as AutoModelForCausalLM and AutoTokenizer read them.

    Raises UserError.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    found = compare_model(model.eval(), expected, source, f"read by transformers {version('transformers')}", to)
    compare_tokenizer(folder, source.tokenizer)
    return [found, f"read by transformers: the same token ids of {len(TEXTS)} texts, and the same control tokens"]


def compare_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if transformers reads other token ids or other control tokens from the tokenizer in `folder`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        reference = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the class that tokenizer_config.json names raises what it likes
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        fix = "remove tokenizer_class from its tokenizer_config.json; or verify=false"
        raise UserError(f"transformers cannot read the tokenizer: {reason}", tokenizer.folder, fix) from error
    expected = [tokenizer.encode(text) for text in TEXTS]
    if _token_ids(reference) != expected:
        generic = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        if _token_ids(generic) != expected:
            raise UserError(
                "transformers reads other token ids from the written tokenizer",
                tokenizer.folder,
                "report this with the tokenizer",
            )
        # Version 5 has its own class for some model types, whatever tokenizer_config.json names, e.g. for qwen2.
        message = f"AutoTokenizer reads other token ids: for this model_type it takes {type(reference).__name__}, which ignores parts of tokenizer.json"
        fix = "verify=false writes the folder all the same, then read it with PreTrainedTokenizerFast.from_pretrained; or format=gguf"
        raise UserError(message, tokenizer.folder, fix)
    own = {role: tokenizer.named_tokens.get(f"{role}_token") for role in ("bos", "eos")}
    read = {role: getattr(reference, f"{role}_token") for role in own}
    if read != own:
        raise UserError(
            f"transformers reads the control tokens {read}, expected {own}",
            tokenizer.folder,
            "report this with the tokenizer",
        )


def _token_ids(reference: Any) -> list[list[int]]:
    return [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
