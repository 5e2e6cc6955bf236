"""Hugging Face folder of a model without adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.export.verify import has_adapter, write_whole_model
from runner.inference.load import LoadedModel


@FORMATS.register("hf")
def write_hf(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], list[str]]:
    """A folder that AutoModelForCausalLM and AutoTokenizer of transformers 4 and 5 load."""
    if has_adapter(source.model):
        raise UserError(
            "this run trained an adapter",
            "format=hf",
            "format=merged adds it to its base model, format=peft writes the adapter alone",
        )
    return write_whole_model(cfg, source, folder, before=None)
