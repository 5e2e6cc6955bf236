"""Weights as MiniMind's scripts read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from runner.inference.export.command import FORMATS, ExportSettings
from runner.inference.export.verify import (
    MAX_DIFFERENCE,
    check_difference,
    largest_difference,
    log_probs,
    round_weights,
)
from runner.inference.load import LoadedModel


@FORMATS.register("minimind")
def write_minimind(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Callable[[], list[str]]:
    """model.pth as MiniMind's scripts read it (a state dict in float16), and the tokenizer."""
    import torch

    from models.families.decoder import DecoderConfig
    from models.formats.load import load_into
    from models.formats.save import copy_tokenizer_files
    from models.formats.tensor_files import read_pth
    from models.language_model import create_model
    from models.lora import merge_adapters

    model_cfg = source.model.cfg
    if (
        not isinstance(model_cfg, DecoderConfig)
        or not model_cfg.tie_word_embeddings
        or any((model_cfg.attention_bias, model_cfg.attention_out_bias, model_cfg.mlp_bias))
    ):
        raise UserError(
            "MiniMind computes models of its own shape only: tied embeddings, no biases", "format=minimind", "format=hf"
        )
    merge_adapters(source.model)
    state = {
        name: tensor.half().contiguous() for name, tensor in source.model.state_dict().items() if ".lora." not in name
    }
    torch.save(state, folder / "model.pth")
    copy_tokenizer_files(source.tokenizer.folder, folder)

    def verify() -> list[str]:
        round_weights(source.model, torch.float16)
        again = create_model(model_cfg).eval()
        load_into(again, read_pth(folder / "model.pth"), str(folder))
        difference = largest_difference(log_probs(again, source.tokenizer), log_probs(source.model, source.tokenizer))
        check_difference(difference, MAX_DIFFERENCE, "the file that was read again", f"to={cfg.to}")
        return [f"read again: largest difference of a log-probability {difference:.1g}, beside rounding to float16"]

    return verify
