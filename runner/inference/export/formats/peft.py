"""Adapter folder of PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.export.verify import MAX_DIFFERENCE, check_difference, has_adapter, largest_difference, log_probs
from runner.inference.load import LoadedModel

if TYPE_CHECKING:
    from models.config import LoraConfig


def _plain_adapter(folder: Path) -> LoraConfig:
    """Return the settings of an adapter folder.

    Raises UserError if it holds more than adapters: `save_adapter` would not write the rest.
    """
    from models.formats.peft import read_adapter

    adapter = read_adapter(folder)
    if adapter.replaced:
        message = (
            f"this adapter has tensors of its base model, too, e.g. {next(iter(adapter.replaced))}: they would be lost"
        )
        raise UserError(message, "format=peft", "format=merged, or use the folder as it is")
    return adapter.cfg


@FORMATS.register("peft")
def write_peft(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], list[str]]:
    """An adapter folder of PEFT, with the path of its base model."""
    from models.formats.json_files import base_model_of
    from models.formats.load import load_model
    from models.formats.save import save_adapter
    from runner.inference.load import run_of_checkpoint, saved_adapter, weights_dir

    if not has_adapter(source.model):
        raise UserError("this run trained no adapter", "format=peft", "format=hf")
    if cfg.dtype != "float32":
        raise UserError(
            f"adapters are written in float32, got dtype={cfg.dtype}", f"dtype={cfg.dtype}", "dtype=float32"
        )
    run = run_of_checkpoint(source.folder)
    of_checkpoint = saved_adapter(run) if run else None
    weights = source.folder if run else weights_dir(source.folder)
    adapter, base = of_checkpoint or (_plain_adapter(weights), base_model_of(weights))
    save_adapter(folder, source.model, adapter, str(base), source.tokenizer.folder, stop_ids=source.tokenizer.stop_ids)

    def verify() -> list[str]:
        difference = largest_difference(
            log_probs(load_model(folder), source.tokenizer), log_probs(source.model, source.tokenizer)
        )
        check_difference(difference, MAX_DIFFERENCE, "the adapter that was read again", f"to={cfg.to}")
        return [f"read again: largest difference of a log-probability {difference:.1g}"]

    return verify
