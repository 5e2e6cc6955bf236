"""Load a trained model: from a run directory, one of its checkpoints, or a Hugging Face or PEFT folder."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, print_note
from common.filesystem import read_bounded, read_json_object
from common.guarded_files import check_own_files
from common.limits.parsers import parse_yaml

CHECKPOINT_POINTERS = ("best", "latest")  # files in checkpoints/ with the name of a checkpoint
MAX_SAVED_BYTES = 1 << 20  # bytes; a larger config.yaml is not read

if TYPE_CHECKING:
    import torch

    from data.tokenize.tokenizer import Tokenizer
    from models.config import LoraConfig, ModelConfig
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
    import torch

    with torch.inference_mode(False):  # the probe of a model of transformers takes gradients
        return _load_trained(folder, device)


def _load_trained(folder: Path, device: str) -> LoadedModel:
    from data.tokenize.origin import tokenizer_of_weights
    from data.tokenize.tokenizer import Tokenizer
    from models.families.decoder import DecoderConfig
    from models.formats.load import load_model
    from runner.engine.device.distributed import resolve_device

    target = resolve_device(device)
    folder = checkpoint_dir(folder)
    run = run_of_checkpoint(folder)
    weights = folder if run else weights_dir(folder)
    stage, data = saved_section(run or folder, "stage"), saved_section(run or folder, "data")
    data_format = stage.get("data_format") or stage.get("rows")  # `rows`: runs of version 0.2
    model, tokenizer = (
        (_load_checkpoint(folder, run), _tokenizer_of_run(run, data_format))
        if run
        else (load_model(weights), Tokenizer.load(tokenizer_of_weights(weights) or weights))
    )
    for line in tokenizer.dropout_note:
        print_note(line)
    if tokenizer.largest_text_id >= model.cfg.vocab_size:
        message = f"the tokenizer has a token with the id {tokenizer.largest_text_id:,}, the model has ids below {model.cfg.vocab_size:,}"
        raise UserError(
            message, str(weights), "copy or download the folder again: its tokenizer is that of another model"
        )
    if (model_type := saved_section(run or folder, "model").get("model_type")) and isinstance(model.cfg, DecoderConfig):
        # the base model of an adapter may be written as another class
        model.cfg = dataclasses.replace(model.cfg, model_type=model_type)
    model = model.to(target).eval()
    model.prepare(is_packed=False)
    return LoadedModel(folder, data_format, data, model, tokenizer, target)


def weights_dir(folder: Path) -> Path:
    """Return the model folder of a run, or `folder` if it is no run."""
    if not folder.is_dir():
        raise UserError(
            "the folder does not exist",
            f"run={folder}",
            "give a run directory, a Hugging Face or PEFT folder, or run=last",
        )
    check_own_files(folder, (), shallow=("model", ".hydra"))
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "run.json").exists():
        raise UserError(
            "this run has no model yet: it is not finished",
            f"run={folder}",
            f"finish it: python runner/train.py resume={folder}",
        )
    return folder


def saved_section(folder: Path, name: str) -> dict[str, Any]:
    """Return a section of the config of a run; empty if `folder` is no run."""
    config = folder / ".hydra" / "config.yaml"
    if not config.exists():
        return {}
    try:
        return dict(parse_yaml(read_bounded(config, MAX_SAVED_BYTES).decode("utf-8")).get(name, {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"the saved config of the run cannot be read: {error}",
            str(config),
            f"run={folder / 'model'} takes the model alone",
        ) from error


def checkpoint_dir(folder: Path) -> Path:
    """Return the folder that `checkpoints/best` or `checkpoints/latest` of a run names, any other path as it is."""
    from runner.checkpoint.format import CHECKPOINTS_DIR

    if folder.name not in CHECKPOINT_POINTERS or folder.parent.name != CHECKPOINTS_DIR or not folder.is_file():
        return folder
    return folder.with_name(Path(read_bounded(folder, 64).decode("utf-8", "replace").strip()).name)


def run_of_checkpoint(folder: Path) -> Path | None:
    """Return the run directory if `folder` is one of its checkpoints or its best weights, else None."""
    from runner.checkpoint.atomic_dir import STEP_NAME
    from runner.checkpoint.format import CHECKPOINTS_DIR
    from runner.checkpoint.retention import BEST_DIR

    is_checkpoint = folder.parent.name == CHECKPOINTS_DIR and bool(
        STEP_NAME.fullmatch(folder.name) or BEST_DIR.fullmatch(folder.name)
    )
    return (
        folder.parent.parent if is_checkpoint and (folder.parent.parent / ".hydra" / "config.yaml").is_file() else None
    )


def saved_adapter(run: Path) -> tuple[LoraConfig, Path] | None:
    """Return the settings of the adapter that a run trains, and the folder of its base model; None if it trains the
    whole model.
    """
    from models.config import LoraConfig
    from models.formats.load import weights_under_adapter

    section = saved_section(run, "stage").get("lora")
    if section is None:
        return None
    base = read_json_object(run / "run.json").get("init_from")
    if not isinstance(base, str) or not Path(base).exists():
        raise UserError(
            "the base model of this run's adapter does not exist",
            str(base),
            f"restore it; run={run / 'model'} has another path to it",
        )
    lora: LoraConfig = _from_saved(LoraConfig, section, run)
    return lora, weights_under_adapter(lora, Path(base))


def _load_checkpoint(folder: Path, run: Path) -> LanguageModel:
    """Return the fp32 model with the weights of a checkpoint.

    Raises UserError if the checkpoint or the saved settings are damaged.
    """
    from models.config import MODELS
    from models.formats.load import add_run_adapter, load_into, load_weights
    from models.formats.stored_size import check_size_of_weights
    from models.language_model import create_model
    from runner.checkpoint.atomic_dir import verify_dir
    from runner.checkpoint.format import read_model_tensors
    from runner.engine.state import load_strict, saved_tensors

    check_own_files(run, ("checkpoints",), shallow=(".hydra", "tokenizer"))
    if not folder.is_dir() or (reason := verify_dir(folder)):
        problem = f"this checkpoint is damaged: {reason}" if folder.is_dir() else "this checkpoint does not exist"
        raise UserError(
            problem, str(folder), f"run={run} has the model of the run; ls {folder.parent} lists its checkpoints"
        )
    section = saved_section(run, "model")
    cfg: ModelConfig = _from_saved(MODELS.get(str(section.get("family", "decoder"))), section, run)
    adapter = saved_adapter(run)
    if adapter is None:
        check_size_of_weights(cfg, folder)
    model = create_model(cfg)
    if adapter is not None:
        load_into(model, load_weights(adapter[1], cfg.family), str(adapter[1]))
        add_run_adapter(model, adapter[0], read_json_object(run / "run.json")["init_from"])
    load_strict(saved_tensors(model), read_model_tensors(folder), folder)
    return model.eval()


def _tokenizer_of_run(run: Path, data_format: str | None) -> Tokenizer:
    """Return the run's tokenizer; of a chat model with the stop ids that its `model/` gets, too."""
    from data.tokenize.chat_template import ChatTemplate
    from data.tokenize.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(run / "tokenizer")
    return (
        tokenizer
        if data_format == "text"
        else dataclasses.replace(tokenizer, stop_ids=tuple(ChatTemplate(tokenizer).stop_ids))
    )


def _from_saved(schema: type, section: dict[str, Any], run: Path) -> Any:
    """Return a section of a saved config as its dataclass, those inside of it included.

    Raises UserError if a field is missing or unknown.
    """
    hints = typing.get_type_hints(schema)
    try:
        values = {}
        for name, value in section.items():
            nested = next(
                (kind for kind in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(kind)), None
            )
            values[name] = (
                _from_saved(typing.cast(type, nested), value, run) if nested and isinstance(value, dict) else value
            )
        return schema(**values)
    except (KeyError, TypeError) as error:
        fix = f"run={run / 'model'} takes the model alone"
        raise UserError(
            f"the saved config of the run cannot be read: {error}", str(run / ".hydra" / "config.yaml"), fix
        ) from error
