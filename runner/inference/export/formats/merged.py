"""Hugging Face folder of a base model with its adapter added."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.export.verify import has_adapter, log_probs, write_whole_model
from runner.inference.load import LoadedModel


@FORMATS.register("merged")
def write_merged(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], list[str]]:
    """The same folder, of the base model with the adapter added to its weights in fp32."""
    from models.lora import merge_adapters

    if not has_adapter(source.model):
        raise UserError("this run trained no adapter", "format=merged", "format=hf")
    before = log_probs(source.model, source.tokenizer) if cfg.verify else None
    merge_adapters(source.model)
    return write_whole_model(cfg, source, folder, before)
