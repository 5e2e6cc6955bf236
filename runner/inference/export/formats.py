"""Formats of export.py: each function writes the files into a folder, and returns a function that compares them with
the model and says what it found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from common.errors import UserError
from common.registry import Registry
from common.settings import check_choice
from runner.inference.load import LoadedModel, saved_adapter, weights_dir

DTYPES = ("float32", "bfloat16", "float16", "q8_0")
SHORT_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}
SHARD_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")  # as the hub writes them
HUB_REPO = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

Verify = Callable[[], list[str]]  # raises UserError if what was written differs

FORMATS: Registry[Callable[[ExportSettings, LoadedModel, Path], Verify]] = Registry("format", None)


@dataclass
class ExportSettings:
    # run directory (the weights in its model/), RUN/checkpoints/step-N, best or latest, Hugging Face or PEFT folder,
    # sweep (its best job), or last
    run: str
    to: str  # folder to write; it must not exist
    # hf, merged (an adapter added to its base model), peft (an adapter), gguf (llama.cpp, Ollama) or minimind (.pth)
    format: str
    # of the weights: float32 (fp32), bfloat16 (bf16) or float16 (fp16); gguf: q8_0 too; auto: float32, minimind float16
    dtype: str
    max_shard_size: str  # largest file of weights, e.g. 5GB; hf and merged
    license: Optional[str]  # licence identifier for the model card, e.g. apache-2.0; null: the card names none
    # peft: name on the hub that the adapter gives its base model, e.g. me/my-model; null: the path here
    base_model: Optional[str]
    # gguf: path of llama.cpp's convert_hf_to_gguf.py, for models that this program does not write itself
    converter: Optional[str]
    verify: bool  # read the files again and compare them with the model

    REGISTRIES = {"format": FORMATS}

    def __post_init__(self) -> None:
        FORMATS.get(self.format)
        default = "float16" if self.format == "minimind" else "float32"
        self.dtype = (SHORT_DTYPES | {"auto": default}).get(self.dtype, self.dtype)
        by_format = {"gguf": DTYPES, "minimind": ("float16",)}
        check_choice("dtype", self.dtype, by_format.get(self.format, DTYPES[:3]))
        if not SHARD_SIZE.fullmatch(self.max_shard_size) or float(self.max_shard_size[:-2]) == 0:
            message = f"max_shard_size must be a number above 0 with KB, MB, GB or TB, got {self.max_shard_size}"
            raise UserError(message, f"max_shard_size={self.max_shard_size}", "e.g. max_shard_size=5GB")
        if self.license and not LICENSE.fullmatch(self.license):
            raise UserError(
                f"license must be an identifier of small letters, digits and .+-, got {self.license}",
                f"license={self.license}",
                "license=apache-2.0",
            )
        if self.base_model and (self.format != "peft" or not HUB_REPO.fullmatch(self.base_model)):
            problem = "is no name of a model on the hub" if self.format == "peft" else "is read by format=peft only"
            raise UserError(
                f"base_model {problem}", f"base_model={self.base_model}", "format=peft base_model=OWNER/NAME"
            )
        if self.converter and (self.format != "gguf" or not Path(self.converter).is_file()):
            problem = "is no file" if self.format == "gguf" else "is read by format=gguf only"
            raise UserError(
                f"converter {problem}",
                f"converter={self.converter}",
                "format=gguf converter=PATH/convert_hf_to_gguf.py",
            )

    @property
    def unread(self) -> dict[str, str]:
        return {"max_shard_size": "format=hf"} if self.format in ("gguf", "minimind", "peft") else {}


@FORMATS.register("hf")
def write_hf(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Verify:
    """A folder that AutoModelForCausalLM and AutoTokenizer of transformers 4 and 5 load."""
    if source.has_adapter:
        raise UserError(
            "this run trained an adapter",
            "format=hf",
            "format=merged adds it to its base model, format=peft writes the adapter alone",
        )
    return _write_whole_model(cfg, source, folder)


@FORMATS.register("merged")
def write_merged(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Verify:
    """The same folder, of the base model with the adapter added to its weights in fp32."""
    from models.lora import merge_adapters
    from runner.inference.export.verify import log_probs

    _check_has_adapter(cfg, source)
    before = log_probs(source.model, source) if cfg.verify else None
    merge_adapters(source.model)
    return _write_whole_model(cfg, source, folder, before)


def _check_has_adapter(cfg: ExportSettings, source: LoadedModel) -> None:
    if not source.has_adapter:
        raise UserError("this run trained no adapter", f"format={cfg.format}", "format=hf")


def _write_whole_model(cfg: ExportSettings, source: LoadedModel, folder: Path, before: Any = None) -> Verify:
    """`before`: log-probabilities before the adapter was merged."""
    from models.formats.load import load_model
    from models.formats.save import save_model
    from runner.inference.export import hf_compatibility, verify

    tokenizer = source.tokenizer
    save_model(
        folder,
        source.model,
        source.model.cfg,
        tokenizer.folder,
        tokenizer.stop_ids,
        dtype=cfg.dtype,
        shard_size=cfg.max_shard_size,
    )
    problems_of_4 = hf_compatibility.make_readable_by_transformers_4(folder, hf_compatibility.model_class_of(source))

    def compare() -> list[str]:
        found = [] if before is None else [verify.compare_merged(source, before, cfg.run)]
        expected = verify.rounded_log_probs(source, cfg.dtype)
        return [
            *found,
            # one copy in memory at a time
            verify.compare_model(load_model(folder), expected, source, "read again", cfg.to),
            *verify.compare_with_transformers(folder, expected, source, cfg.to),
            *(f"transformers 4 does not read this model: {problem}" for problem in problems_of_4),
        ]

    return compare


@FORMATS.register("peft")
def write_peft(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Verify:
    """An adapter folder of PEFT, with the path of its base model."""
    from models.formats.json_files import base_model_of
    from models.formats.load import load_model, weights_under_adapter
    from models.formats.peft import read_adapter
    from models.formats.save import save_adapter
    from runner.inference.export import verify

    _check_has_adapter(cfg, source)
    if cfg.dtype != "float32":
        raise UserError(
            f"adapters are written in float32, got dtype={cfg.dtype}", f"dtype={cfg.dtype}", "dtype=float32"
        )
    tokenizer = source.tokenizer
    if source.folder != source.run_dir and (saved := saved_adapter(source.run_dir, source.settings)):  # a checkpoint
        lora, start = saved
        base = weights_under_adapter(lora, start)
    else:
        weights = weights_dir(source.folder)
        adapter, base = read_adapter(weights), base_model_of(weights)
        if adapter.replaced:  # `save_adapter` would not write them
            message = f"this adapter has tensors of its base model, too, e.g. {next(iter(adapter.replaced))}: they would be lost"
            raise UserError(message, "format=peft", "format=merged, or use the folder as it is")
        lora = adapter.cfg
    save_adapter(folder, source.model, lora, str(base), tokenizer.folder, stop_ids=tokenizer.stop_ids)

    def compare() -> list[str]:
        expected = verify.log_probs(source.model, source)
        return [verify.compare_model(load_model(folder), expected, source, "read again", cfg.to)]

    return compare


# settings that MiniMind's scripts fix, and those of models with experts
MINIMIND_FIXED_SETTINGS = "num_attention_heads rope_theta rope_scaling rms_norm_eps tie_word_embeddings attention_bias attention_out_bias mlp_bias".split()
MINIMIND_EXPERT_SETTINGS = ["num_experts_per_tok", "norm_topk_prob"]


@FORMATS.register("minimind")
def write_minimind(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Verify:
    """model.pth as MiniMind's scripts read it (a state dict in float16), and the tokenizer."""
    import torch

    from models.families.decoder import DecoderConfig
    from models.formats.load import load_model
    from models.formats.save import copy_tokenizer_files
    from models.formats.tensor_files import read_pth_config
    from models.lora import merge_adapters
    from runner.inference.export import verify

    model, model_cfg = source.model, source.model.cfg
    merge_adapters(model)
    state = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "model.pth")
    read = read_pth_config(folder / "model.pth") if isinstance(model_cfg, DecoderConfig) else None
    names = MINIMIND_FIXED_SETTINGS + MINIMIND_EXPERT_SETTINGS * bool(read and read.num_experts)
    if differing := [name for name in names if getattr(read, name, "") != getattr(model_cfg, name, None)]:
        raise UserError(
            f"MiniMind's scripts compute another model: its {', '.join(differing)} differ",
            "format=minimind",
            "format=merged" if source.has_adapter else "format=hf",
        )
    copy_tokenizer_files(source.tokenizer.folder, folder)

    def compare() -> list[str]:
        expected = verify.rounded_log_probs(source, cfg.dtype)
        found = verify.compare_model(load_model(folder / "model.pth"), expected, source, "read again", cfg.to)
        return [f"{found}, beside rounding to float16"]

    return compare


@FORMATS.register("gguf")
def write_gguf_folder(cfg: ExportSettings, source: LoadedModel, folder: Path) -> Verify:
    """model.gguf for llama.cpp, and a Modelfile for Ollama; an adapter is merged."""
    try:
        from runner.inference.export import gguf_file, gguf_tokenizer
    except ModuleNotFoundError as error:
        raise UserError(
            "format=gguf needs the package gguf", "format=gguf", 'pip install "lm-runner[gguf]", or pip install gguf'
        ) from error
    from models.lora import merge_adapters

    merge_adapters(source.model)
    path = folder / "model.gguf"
    (folder / "Modelfile").write_text(gguf_tokenizer.modelfile(source), encoding="utf-8")
    if cfg.converter:
        gguf_file.convert(cfg.converter, path, source, cfg.dtype)
        return lambda: [gguf_file.check_converted(str(cfg.converter), path, source, cfg.dtype)]
    tensors = gguf_file.write_gguf(path, source, cfg.dtype, Path(cfg.to).name)
    return lambda: [gguf_file.check_written(path, tensors, cfg.dtype), *gguf_tokenizer.limits(source.tokenizer)]
