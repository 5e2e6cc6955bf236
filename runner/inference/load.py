"""Load a trained model: from a run directory, one of its checkpoints, or a Hugging Face or PEFT folder."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, print_note
from common.guarded_files import check_own_files
from runner.run_dir.metadata import RunMetadata
from runner.run_dir.saved_config import CONFIG_FILE, load_yaml

if TYPE_CHECKING:
    import torch

    from data.tokenize.chat_template import ChatTemplate
    from data.tokenize.tokenizer import Tokenizer
    from models.config import LoraConfig, ModelConfig
    from models.language_model import LanguageModel

CHECKPOINT_POINTERS = ("best", "latest")  # files in checkpoints/ with the name of a checkpoint

RunSettings = dict[str, Any]  # saved config of a run


@dataclass(frozen=True)
class LoadedModel:
    folder: Path  # a model folder, a run, or one of its checkpoints
    run_dir: Path  # of a checkpoint its run, else `folder`
    settings: RunSettings  # of its run; empty without a run
    model: LanguageModel
    tokenizer: Tokenizer
    device: torch.device
    dtype: str | None = None  # of weights and computation: bf16 or fp16; None: fp32

    def compute_in(self, dtype: str) -> LoadedModel:
        """Round the fp32 weights in place to the `dtype` of chat.py, which all products then have.

        Buffers stay fp32: bf16 rounds positions 257 and 258 to the same number. Raises UserError if the device does not
        compute in it.
        """
        from runner.engine.device.precision import Precision, PrecisionConfig

        try:
            precision = Precision(PrecisionConfig(dtype).on(self.device.type), self.device)
        except UserError as error:
            raise UserError(error.message, f"dtype={dtype}", "dtype=fp32") from error
        if precision.name == "fp32":
            return self
        self.model.generates_in_batches(0)  # found with fp32 weights: rounding to 16 bits would hide differences
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.to(precision.dtype)
        print_note(f"the model computes in {precision.name}")
        return dataclasses.replace(self, dtype=precision.name)

    @property
    def data_format(self) -> str | None:
        """Format of the data that its run trained on: text, chat or preference; None without a run."""
        return self.settings.get("stage", {}).get("data_format")

    @property
    def is_chat_model(self) -> bool:
        """Whether its run trained on conversations; without a run, whether its tokenizer has a chat template."""
        return self.data_format != "text" if self.data_format else self.tokenizer.chat_template is not None

    @cached_property
    def template(self) -> ChatTemplate:
        """Raises UserError if the tokenizer has no chat template, or one that cannot be used."""
        from data.tokenize.chat_template import ChatTemplate

        return ChatTemplate(self.tokenizer)

    @property
    def has_adapter(self) -> bool:
        from models.lora import lora_layers

        return bool(lora_layers(self.model))

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a plain text that the model continues."""
        return [*self.tokenizer.bos_ids, *self.tokenizer.encode(text)]

    def stop_ids(self, is_chat: bool) -> tuple[int, ...]:
        """Return the ids that end an answer, or a continued text."""
        return tuple(self.template.stop_ids) if is_chat else self.tokenizer.stop_ids


def load_trained(folder: Path, device: str, setting: str = "run") -> LoadedModel:
    """Raises UserError if there is no finished model in `folder`, the value of `setting`."""
    import torch

    from data.tokenize.chat_template import ChatTemplate
    from data.tokenize.origin import tokenizer_of_weights
    from data.tokenize.tokenizer import Tokenizer
    from models.families.decoder import DecoderConfig
    from models.formats.load import load_model
    from runner.engine.device.distributed import resolve_device

    target, run_dir = resolve_device(device), run_dir_of(folder)
    settings = read_settings(run_dir)
    with torch.inference_mode(False):  # the probe of a model of transformers takes gradients
        if checkpoint := find_checkpoint(folder):
            model, tokenizer = _load_checkpoint(checkpoint, settings), Tokenizer.load(run_dir / "tokenizer")
            if settings["stage"].get("data_format") != "text":  # with the stop ids that `model/` of the run gets
                tokenizer = dataclasses.replace(tokenizer, stop_ids=tuple(ChatTemplate(tokenizer).stop_ids))
        else:
            weights = weights_dir(folder, setting)
            model = load_model(weights)
            tokenizer = Tokenizer.load(tokenizer_of_weights(weights) or (run_dir if weights.is_file() else weights))
        for line in tokenizer.dropout_note:
            print_note(line)
        if tokenizer.largest_text_id >= model.cfg.vocab_size:
            message = f"the tokenizer has a token with the id {tokenizer.largest_text_id:,}, the model has ids below {model.cfg.vocab_size:,}"
            raise UserError(
                message, tokenizer.folder, "copy or download the folder again: its tokenizer is that of another model"
            )
        if (model_type := settings.get("model", {}).get("model_type")) and isinstance(model.cfg, DecoderConfig):
            # the base model of an adapter may be written as another class
            model.cfg = dataclasses.replace(model.cfg, model_type=model_type)
        if isinstance(lora := settings.get("stage", {}).get("lora"), dict) and not lora.get("quantize"):
            _check_base(model, run_dir, f"{setting}={folder}")
        model = model.to(target).eval()
        model.prepare(is_packed=False)
    return LoadedModel(checkpoint or folder, run_dir, settings, model, tokenizer, target)


def _check_base(model: LanguageModel, run_dir: Path, setting: str) -> None:
    """Raise UserError if the weights under the adapter of a run have changed since it was trained: its `init_from` may
    have been trained on. Files as old as the run are not compared.
    """
    from models.language_model import stored_tensors
    from runner.checkpoint.compatibility import has_other_frozen_weights
    from runner.checkpoint.format import CHECKPOINTS_DIR

    base, checkpoints = Path(RunMetadata.read(run_dir).get("init_from") or ""), run_dir / CHECKPOINTS_DIR
    if not checkpoints.is_dir():
        return
    files = filter(Path.is_file, (base, *base.glob("*.safetensors"), *base.glob("model/*.safetensors")))
    if not any(file.stat().st_mtime > checkpoints.stat().st_mtime for file in files):
        return
    weights = {name: tensor for name, tensor in stored_tensors(model).items() if ".lora." not in name}
    if has_other_frozen_weights(run_dir, weights):
        fix = f"restore them; or run={run_dir / 'model'} adds it to the changed ones"
        raise UserError(f"the weights under this adapter have changed since it was trained: {base}", setting, fix)


def weights_dir(folder: Path, setting: str = "run") -> Path:
    """Return the model folder of a run, or `folder` if it is no run."""
    from models.formats.json_files import check_other_tools

    if folder.is_file():
        check_other_tools(folder)
        return folder
    if not folder.is_dir():
        raise UserError(
            "the folder does not exist",
            f"{setting}={folder}",
            "give a run directory, or a Hugging Face or PEFT folder",
        )
    check_own_files(folder, (), shallow=("model", ".hydra"))
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "run.json").exists():
        raise UserError(
            "this run has no model/: it is not finished, or model/ was deleted",
            f"{setting}={folder}",
            f"finish it: python runner/train.py resume={folder}; or use its newest checkpoint: {setting}={folder}@last",
        )
    return folder


def find_checkpoint(folder: Path) -> Path | None:
    """Return the folder of a checkpoint, or of best weights, that `folder` is or that the file `checkpoints/best` or
    `checkpoints/latest` names; None if it is none of a run.

    Raises UserError if the file names none.
    """
    from runner.checkpoint.format import CHECKPOINTS_DIR
    from runner.checkpoint.saving import is_weights_name, read_pointer

    if folder.parent.name != CHECKPOINTS_DIR or not (folder.parents[1] / CONFIG_FILE).is_file():
        return None
    if folder.name in CHECKPOINT_POINTERS and folder.is_file():
        if (name := read_pointer(folder)) is None:
            fix = f"doctor.py run={folder.parents[1]} repair=true writes it again; ls {folder.parent} lists the checkpoints"
            raise UserError("the file names no checkpoint", folder, fix)
        return folder.with_name(name)
    return folder if is_weights_name(folder.name) else None


def run_dir_of(folder: Path) -> Path:
    """Return the run of a checkpoint, the folder of a .pth file, else `folder`."""
    checkpoint = find_checkpoint(folder)
    return checkpoint.parents[1] if checkpoint else folder.parent if folder.is_file() else folder


def read_settings(run_dir: Path) -> RunSettings:
    """Return the saved config of a run; {} if `run_dir` is no run."""
    if not (run_dir / CONFIG_FILE).exists():
        return {}
    check_own_files(run_dir, (), shallow=(".hydra",))
    try:
        sections = dict(load_yaml(run_dir / CONFIG_FILE))
        return sections | {name: dict(sections.get(name, {})) for name in ("stage", "data", "model")}
    except (OSError, ValueError, TypeError) as error:
        raise unreadable_settings(run_dir, error) from error


def unreadable_settings(run_dir: Path, error: Exception) -> UserError:
    return UserError(
        f"the saved config of the run cannot be read: {error}",
        run_dir / CONFIG_FILE,
        f"run={run_dir / 'model'} takes the model alone",
    )


def saved_adapter(run: Path, settings: RunSettings) -> tuple[LoraConfig, Path] | None:
    """Return the settings of the adapter that a run trains, and the path that it started from; None if it trains the
    whole model.
    """
    from models.config import LoraConfig

    section = settings["stage"].get("lora")
    if section is None:
        return None
    start = RunMetadata.read(run).get("init_from")
    if not isinstance(start, str) or not Path(start).exists():
        raise UserError(
            "the base model of this run's adapter does not exist",
            str(start),
            f"restore it; run={run / 'model'} has another path to it",
        )
    lora: LoraConfig = _from_saved(LoraConfig, section, run)
    return lora, Path(start)


def _load_checkpoint(folder: Path, settings: RunSettings) -> LanguageModel:
    """Return the fp32 model with the weights of a checkpoint.

    Raises UserError if the checkpoint or the saved settings are damaged.
    """
    from models.config import MODELS
    from models.formats.load import add_run_adapter, model_with_weights, weights_under_adapter
    from models.formats.stored_size import check_size_of_weights
    from models.language_model import create_model
    from runner.checkpoint.atomic_dir import verify_dir
    from runner.checkpoint.format import read_model_tensors
    from runner.engine.state import load_strict, saved_tensors

    run = folder.parents[1]
    check_own_files(run, ("checkpoints",), shallow=("tokenizer",))
    if not folder.is_dir() or (reason := verify_dir(folder)):
        problem = f"this checkpoint is damaged: {reason}" if folder.is_dir() else "this checkpoint does not exist"
        raise UserError(
            problem, folder, f"run={run} has the model of the run; ls {folder.parent} lists its checkpoints"
        )
    section = settings["model"]
    cfg: ModelConfig = _from_saved(MODELS.get(str(section.get("family", "decoder"))), section, run)
    adapter = saved_adapter(run, settings)
    if adapter is None:
        check_size_of_weights(cfg, folder)
        model = create_model(cfg)
    else:
        lora, start = adapter
        model = model_with_weights(cfg, weights_under_adapter(lora, start))
        add_run_adapter(model, lora, str(start))
    load_strict(saved_tensors(model), read_model_tensors(folder), folder)
    return model.eval()


def _from_saved(schema: type, section: dict[str, Any], run: Path) -> Any:
    """Return a section of a saved config as its dataclass, those inside of it included.

    Raises UserError if a field is missing or unknown.
    """
    hints, values = typing.get_type_hints(schema), {}
    try:
        for name, value in section.items():
            kinds = [kind for kind in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(kind)]
            is_nested = kinds and isinstance(value, dict)
            values[name] = _from_saved(typing.cast(type, kinds[0]), value, run) if is_nested else value
        return schema(**values)
    except (KeyError, TypeError) as error:
        raise unreadable_settings(run, error) from error
