"""Folders of transformers, of a whole model."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.inference.export.command import ExportSettings
from runner.inference.export.hf_compatibility import make_readable_by_transformers_4
from runner.inference.export.verify import MAX_DIFFERENCE, MAX_MERGE_DIFFERENCE, TEXTS, check_difference, compare_tokenizer, largest_difference, log_probs
from runner.inference.load import LoadedModel

if TYPE_CHECKING:
    from torch import nn


def has_adapter(model: nn.Module) -> bool:
    from models.lora import lora_layers

    return bool(lora_layers(model))


def write_whole_model(cfg: ExportSettings, source: LoadedModel, folder: Path, before: Any) -> Callable[[], list[str]]:
    import torch

    from models.formats.load import load_model
    from models.formats.save import save_model

    stop_ids = source.tokenizer.stop_ids
    save_model(folder, source.model, source.model.cfg, source.tokenizer.folder, stop_ids, dtype=cfg.dtype, shard_size=cfg.max_shard_size)
    problems_of_4 = make_readable_by_transformers_4(folder, model_class_of(source))

    def verify() -> list[str]:
        found = []
        if before is not None:
            difference = largest_difference(log_probs(source.model, source.tokenizer), before)
            check_difference(difference, MAX_MERGE_DIFFERENCE, "the merged model", f"run={cfg.run}")
            found.append(f"merging changed a log-probability by at most {difference:.1g}")
        round_weights(source.model, getattr(torch, cfg.dtype))
        expected = log_probs(source.model, source.tokenizer)
        for reader, load in (("read again", load_model), (f"read by transformers {version('transformers')}", TransformersReader)):
            difference = largest_difference(log_probs(load(folder), source.tokenizer), expected)  # one copy in memory at a time
            check_difference(difference, MAX_DIFFERENCE, f"what was {reader}", f"to={cfg.to}")
            found.append(f"{reader}: largest difference of a log-probability {difference:.1g}")
        compare_tokenizer(folder, source.tokenizer)
        return [*found, f"read by transformers: the same token ids of {len(TEXTS)} texts, and the same control tokens"] + [
            f"transformers 4 does not read this model: {problem}" for problem in problems_of_4
        ]

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
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False).eval()
        self.cfg = self.model.config

    def __call__(self, ids: Any) -> Any:
        return self.model(ids)


def round_weights(model: nn.Module, dtype: Any) -> None:
    """Round the weights in place as a file in `dtype` holds them."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
