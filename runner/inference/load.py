"""Load a trained model: from a run directory, or a Hugging Face or PEFT folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.language_model import LanguageModel


@dataclass(frozen=True)
class LoadedModel:
    folder: Path
    data_format: str | None  # format of the data that its run trained on: text, chat or preference; None without a run
    model: LanguageModel
    tokenizer: Tokenizer
    device: torch.device

    @property
    def is_chat_model(self) -> bool:
        """Whether its run trained on conversations; without a run, whether its tokenizer has a chat template."""
        return self.data_format != "text" if self.data_format else self.tokenizer.chat_template is not None


def load_trained(folder: Path, device: str) -> LoadedModel:
    """Raises UserError if there is no finished model in `folder`."""
    from data.tokenize.tokenizer import Tokenizer
    from models.formats.load import load_model
    from runner.engine.device.distributed import resolve_device

    target = resolve_device(device)
    weights = weights_dir(folder)
    return LoadedModel(folder, data_format_of(folder), load_model(weights).to(target).eval(), Tokenizer.load(weights), target)


def weights_dir(folder: Path) -> Path:
    """Return the model folder of a run, or `folder` if it is no run."""
    if not folder.is_dir():
        raise UserError("the folder does not exist", f"run={folder}", "give a run directory, a Hugging Face or PEFT folder, or run=last")
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "run.json").exists():
        raise UserError("this run has no model yet: it is not finished", f"run={folder}", f"finish it: python runner/train.py resume={folder}")
    return folder


def data_format_of(folder: Path) -> str | None:
    """Return the data format of a run, None if `folder` is no run."""
    import yaml

    config = folder / ".hydra" / "config.yaml"
    if not config.exists():
        return None
    stage = yaml.safe_load(config.read_text(encoding="utf-8"))["stage"]
    data_format: str = stage.get("data_format") or stage["rows"]  # `rows`: runs of version 0.2
    return data_format
