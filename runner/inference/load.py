"""Load a trained model: from a run directory, or a Hugging Face or PEFT folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.filesystem import read_bounded
from common.guarded_files import check_own_files
from common.limits.parsers import parse_yaml

MAX_SAVED_BYTES = 1 << 20  # bytes; a larger config.yaml is not read

if TYPE_CHECKING:
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.language_model import LanguageModel


@dataclass(frozen=True)
class LoadedModel:
    folder: Path
    data_format: str | None  # format of the data that its run trained on: text, chat or preference; None without a run
    data_settings: dict[str, Any]  # the section `data` of its run; empty without a run
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
    stage, data = saved_section(folder, "stage"), saved_section(folder, "data")
    data_format = stage.get("data_format") or stage.get("rows")  # `rows`: runs of version 0.2
    model, tokenizer = load_model(weights), Tokenizer.load(weights)
    if tokenizer.largest_text_id >= model.cfg.vocab_size:
        message = f"the tokenizer has a token with the id {tokenizer.largest_text_id:,}, the model has ids below {model.cfg.vocab_size:,}"
        raise UserError(message, str(weights), "copy or download the folder again: its tokenizer is that of another model")
    model = model.to(target).eval()
    model.prepare(is_packed=False)
    return LoadedModel(folder, data_format, data, model, tokenizer, target)


def weights_dir(folder: Path) -> Path:
    """Return the model folder of a run, or `folder` if it is no run."""
    if not folder.is_dir():
        raise UserError("the folder does not exist", f"run={folder}", "give a run directory, a Hugging Face or PEFT folder, or run=last")
    check_own_files(folder, (), shallow=("model", ".hydra"))
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "run.json").exists():
        raise UserError("this run has no model yet: it is not finished", f"run={folder}", f"finish it: python runner/train.py resume={folder}")
    return folder


def saved_section(folder: Path, name: str) -> dict[str, Any]:
    """Return a section of the config of a run; empty if `folder` is no run."""
    config = folder / ".hydra" / "config.yaml"
    if not config.exists():
        return {}
    try:
        return dict(parse_yaml(read_bounded(config, MAX_SAVED_BYTES).decode("utf-8")).get(name, {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"the saved config of the run cannot be read: {error}", str(config), f"run={folder / 'model'} takes the model alone") from error
