"""A trained model as it stands on disk: the folder of a run, or any Hugging Face or PEFT folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError

if TYPE_CHECKING:
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.decoder import Decoder


@dataclass(frozen=True)
class LoadedModel:
    folder: Path
    rows: str | None  # the rows its run learned from: text, chat or preference; None where no run is known
    model: Decoder
    tokenizer: Tokenizer
    device: torch.device

    @property
    def chats(self) -> bool:
        """Whether it is spoken to in turns: as its run was trained; without a run, if its tokenizer says how."""
        return self.rows != "text" if self.rows else self.tokenizer.chat_template is not None


def load_trained(folder: Path, device: str) -> LoadedModel:
    """Raises ValueError(what, where, fix) where there is no finished model."""
    from data.tokenize.tokenizer import Tokenizer
    from models.formats.load import load_model
    from runner.engine.device.distributed import resolve_device

    on = resolve_device(device)
    weights = weights_dir(folder)
    return LoadedModel(folder, data_format_of(folder), load_model(weights).to(on).eval(), Tokenizer.load(weights), on)


def weights_dir(folder: Path) -> Path:
    """The model folder of a run, or `folder` itself where it is one."""
    if not folder.is_dir():
        raise UserError("there is no such folder", f"run={folder}", "give a run's folder, a Hugging Face folder, or run=last")
    inside = folder / "model"
    if inside.is_dir():
        return inside
    if is_run_dir(folder):
        raise UserError("this run has not written its model yet", f"run={folder}", f"let it finish: python runner/train.py resume={folder}")
    return folder


def is_run_dir(folder: Path) -> bool:
    return (folder / "run.json").exists()


def data_format_of(folder: Path) -> str | None:
    import yaml

    config = folder / ".hydra" / "config.yaml"
    return yaml.safe_load(config.read_text(encoding="utf-8"))["stage"]["rows"] if config.exists() else None
