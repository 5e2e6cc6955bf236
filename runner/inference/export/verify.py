"""Comparison of an exported model with the trained one, and folders of a whole model.

Compared are log-probabilities and token ids of texts in several languages.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from runner.inference.export.command import ExportSettings
from runner.inference.export.hf_compatibility import make_readable_by_transformers_4
from runner.inference.load import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data.tokenize.tokenizer import Tokenizer


def has_adapter(model: nn.Module) -> bool:
    from models.lora import lora_layers

    return bool(lora_layers(model))


def write_whole_model(cfg: ExportSettings, source: LoadedModel, folder: Path, before: Any) -> Callable[[], list[str]]:
    import torch

    from models.formats.load import load_model
    from models.formats.save import save_model

    stop_ids = source.tokenizer.stop_ids
    save_model(
        folder,
        source.model,
        source.model.cfg,
        source.tokenizer.folder,
        stop_ids,
        dtype=cfg.dtype,
        shard_size=cfg.max_shard_size,
    )
    problems_of_4 = make_readable_by_transformers_4(folder, model_class_of(source))

    def verify() -> list[str]:
        found = []
        if before is not None:
            difference = largest_difference(log_probs(source.model, source.tokenizer), before)
            check_difference(difference, MAX_MERGE_DIFFERENCE, "the merged model", f"run={cfg.run}")
            found.append(f"merging changed a log-probability by at most {difference:.1g}")
        round_weights(source.model, getattr(torch, cfg.dtype))
        expected = log_probs(source.model, source.tokenizer)
        for reader, load in (
            ("read again", load_model),
            (f"read by transformers {version('transformers')}", TransformersReader),
        ):
            # one copy in memory at a time
            difference = largest_difference(log_probs(load(folder), source.tokenizer), expected)
            check_difference(difference, MAX_DIFFERENCE, f"what was {reader}", f"to={cfg.to}")
            found.append(f"{reader}: largest difference of a log-probability {difference:.1g}")
        compare_tokenizer(folder, source.tokenizer)
        return [
            *found,
            f"read by transformers: the same token ids of {len(TEXTS)} texts, and the same control tokens",
        ] + [f"transformers 4 does not read this model: {problem}" for problem in problems_of_4]

    return verify


def model_class_of(source: LoadedModel) -> str | None:
    """Return the name of the class of transformers that a model is one of; None: config.json of the decoder names it."""
    from models.families.transformers import TransformersConfig

    return type(source.model.hf).__name__ if isinstance(source.model.cfg, TransformersConfig) else None


class TransformersReader:
    """The folder as AutoModelForCausalLM loads it, called like a LanguageModel."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        ).eval()
        self.cfg = self.model.config

    def __call__(self, ids: Any) -> Any:
        return self.model(ids)


def round_weights(model: nn.Module, dtype: Any) -> None:
    """Round the weights in place as a file in `dtype` holds them."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))


TEXTS = (
    "The lake lies north of the old mill, 12 km away.",
    "米娜住在湖边的小屋里，她养了九只灰山羊。",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2  # m²",
    "Émile lächelt: 👩‍🔬 🐐 «naïve café» — ½ ≠ 0.5\t\u00a0\r\n  end",
)
# of a log-probability between the model with rounded weights and what was read again: fp32 rounding
MAX_DIFFERENCE = 1e-4
MAX_MERGE_DIFFERENCE = 1e-3  # of a log-probability that merging an adapter into fp32 weights may change


def log_probs(model: Any, tokenizer: Tokenizer) -> list[Tensor]:
    """Return the log-probabilities of all tokens at each position of TEXTS, (T, V) each.

    `model`: a LanguageModel, or a reader that is called like one.
    """
    import torch

    with torch.inference_mode():
        rows = [
            torch.tensor([[*tokenizer.bos_ids, *tokenizer.encode(text)][: model.cfg.max_position_embeddings]])
            for text in TEXTS
        ]
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
            raise UserError(
                "transformers reads other token ids from the written tokenizer",
                str(tokenizer.folder),
                "report this with the tokenizer",
            )
        # Version 5 has its own class for some model types, whatever tokenizer_config.json names, e.g. for qwen2.
        message = f"AutoTokenizer reads other token ids: for this model_type it takes {type(reference).__name__}, which ignores parts of tokenizer.json"
        fix = "verify=false writes the folder all the same, then read it with PreTrainedTokenizerFast.from_pretrained; or format=gguf"
        raise UserError(message, str(tokenizer.folder), fix)
    own = {role: tokenizer.named_tokens.get(f"{role}_token") for role in ("bos", "eos")}
    read = {role: getattr(reference, f"{role}_token") for role in own}
    if read != own:
        raise UserError(
            f"transformers reads the control tokens {read}, expected {own}",
            str(tokenizer.folder),
            "report this with the tokenizer",
        )


def _token_ids(reference: Any) -> list[list[int]]:
    return [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
