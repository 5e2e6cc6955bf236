"""GGUF files for llama.cpp and what is built on it (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), of
models of the decoder family.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    get_tensor_name_map,
    quants,
)

from common.errors import UserError
from models.families.decoder import DecoderConfig
from models.formats.save import save_model
from models.language_model import LanguageModel
from runner.inference.export.gguf_tokenizer import (
    CONVERTER_FIX,
    add_tokenizer,
    check_tokenizer_is_supported,
    template_of_llama_cpp,
)
from runner.inference.export.hf_compatibility import make_readable_by_transformers_4, model_class_of
from runner.inference.load import LoadedModel

# model_type of config.json -> architecture of llama.cpp
ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
}
# of ggml, of which --outtype of convert_hf_to_gguf.py has the small letters
QUANTIZATIONS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
# largest error of a value, relative to the largest of its tensor
ROUNDING = {"float32": 0.0, "float16": 1e-3, "bfloat16": 8e-3, "q8_0": 1e-2}
YARN_BETAS = (32.0, 1.0)  # of llama.cpp: it does not read those of a file
MAX_SUM_ERROR = 1e-6  # relative; of sums over all weights in another order
NEWER_CONVERTER = "use the converter of a newer llama.cpp; verify=false keeps the file"
EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")


def write_gguf(path: Path, source: LoadedModel, dtype: str, name: str) -> dict[str, np.ndarray]:
    """Write `path`; return the fp32 tensors that it holds, by their names in the file, before rounding.

    Adapters must be merged.

    Raises UserError for an architecture or a tokenizer that llama.cpp does not compute.
    """
    cfg = _supported_config(source.model)
    hf_config = cfg.to_hf_config()
    check_tokenizer_is_supported(source.tokenizer)
    architecture = MODEL_ARCH[ARCHITECTURES[hf_config["model_type"]]]
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    writer.add_file_type(LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{QUANTIZATIONS[dtype]}"])
    _add_settings(writer, cfg)
    add_tokenizer(writer, source, cfg.vocab_size)
    names, tensors = get_tensor_name_map(architecture, cfg.num_hidden_layers), {}
    for hf_name, array in _decoder_arrays(source.model, cfg, permuted=architecture is MODEL_ARCH.LLAMA).items():
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        is_exact = array.ndim == 1 or "ffn_gate_inp" in gguf_name  # the router
        kind = GGMLQuantizationType.F32 if is_exact else GGMLQuantizationType[QUANTIZATIONS[dtype]]
        if array.shape[-1] % GGML_QUANT_SIZES[kind][0]:  # rows that no number of blocks fills
            kind = GGMLQuantizationType.F16
        writer.add_tensor(gguf_name, quants.quantize(array, kind), raw_dtype=kind)
        tensors[gguf_name] = array
    if cfg.rope_scaling is not None and cfg.rope_scaling.type == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(cfg))
    writer.write_header_to_file()
    try:
        writer.write_kv_data_to_file()
    except (struct.error, OverflowError) as error:
        raise UserError(
            f"a GGUF file cannot hold a number of this model: {error}", "format=gguf", "format=hf"
        ) from error
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def check_written(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> str:
    """Read the file again, and compare each tensor relative to its largest value. Raises UserError."""
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    difference, limit = 0.0, ROUNDING[dtype]
    for name, expected in tensors.items():
        values = quants.dequantize(stored[name].data, stored[name].tensor_type).reshape(expected.shape)
        difference = max(difference, float(np.abs(values - expected).max() / max(np.abs(expected).max(), 1e-12)))
    if not difference <= limit:
        raise UserError(
            f"a tensor of model.gguf differs by {difference:.2g} of its largest value, rounding to {dtype} by {limit:.0e}",
            path,
            "report this",
        )
    return f"read again: {len(tensors)} tensors, largest difference {difference:.1g} of a tensor's largest value"


def convert(converter: str, path: Path, source: LoadedModel, dtype: str) -> None:
    """Write a Hugging Face folder beside `path` and let llama.cpp's converter read it; the user names that program, so
    it is trusted.
    """
    with TemporaryDirectory(dir=path.parent) as temporary:
        folder = Path(temporary)
        save_model(folder, source.model, source.model.cfg, source.tokenizer.folder, source.tokenizer.stop_ids)
        if (template := folder / "chat_template.jinja").exists():
            template.write_text(template_of_llama_cpp(source.tokenizer), encoding="utf-8")
        make_readable_by_transformers_4(folder, model_class_of(source))
        options = ["--outfile", str(path), "--outtype", QUANTIZATIONS[dtype].lower()]
        command = [sys.executable, converter, temporary, *options]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode or not path.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"the converter failed: {lines[-1] if lines else 'it wrote no file and no message'}",
            f"converter={converter}",
            "format=hf, then convert the folder yourself to see all of its output",
        )


def check_converted(converter: str, path: Path, source: LoadedModel, dtype: str) -> str:
    """Compare what does not depend on how a converter names, splits and orders the weights: tokens, and the norm of all
    matrices. Vectors are left out: some converters add 1 to those of norms.

    Raises UserError, and KeyError if the file has no tokens.
    """
    reader = GGUFReader(path)
    stored, expected = 0.0, 0.0
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            stored += float(np.square(values, dtype=np.float64).sum())
    for name, parameter in source.model.named_parameters():
        if parameter.ndim > 1 and ".lora." not in name:
            expected += float(parameter.detach().double().square().sum())
    difference = abs(math.sqrt(stored) - math.sqrt(expected)) / math.sqrt(expected)
    if not difference <= max(ROUNDING[dtype], MAX_SUM_ERROR):
        message = f"the norm of all matrices that the converter wrote differs by {difference:.2g} of that of the model"
        raise UserError(message, f"converter={converter}", NEWER_CONVERTER)
    tokens, tokenizer = reader.fields["tokenizer.ggml.tokens"].contents(), source.tokenizer
    own = {token: number for token, number in tokenizer.token_ids().items() if token not in tokenizer.control_ids}
    if wrong := [token for token, number in own.items() if number >= len(tokens) or tokens[number] != token]:
        message = f"{len(wrong)} tokens of model.gguf differ from those of the tokenizer, e.g. {min(wrong)!r}"
        raise UserError(message, f"converter={converter}", NEWER_CONVERTER)
    return f"read again: {len(own)} tokens are those of the tokenizer; the norm of all matrices differs by {difference:.1g} of that of the model"


def _supported_config(model: LanguageModel) -> DecoderConfig:
    cfg = model.cfg
    if not isinstance(cfg, DecoderConfig):
        raise UserError(
            f"GGUF files are written for models of the decoder family, this is {cfg.name} of {cfg.family}",
            "format=gguf",
            CONVERTER_FIX,
        )
    # llama.cpp computes a SmolLM3 without some rotary embeddings, whatever config.json has
    cfg = dataclasses.replace(cfg, model_type=None)
    model_type = cfg.to_hf_config()["model_type"]
    if model_type not in ARCHITECTURES or (cfg.qk_norm and cfg.attention_bias):
        raise UserError(f"llama.cpp does not compute a {model_type} with these biases", "format=gguf", CONVERTER_FIX)
    scaling = cfg.rope_scaling
    if scaling is not None and scaling.type == "llama3" and ARCHITECTURES[model_type] != "LLAMA":
        raise UserError(
            f"llama.cpp has no model.rope_scaling.type=llama3 for a {model_type}", "format=gguf", CONVERTER_FIX
        )
    if scaling is not None and scaling.type == "yarn" and (scaling.beta_fast, scaling.beta_slow) != YARN_BETAS:
        raise UserError(
            f"llama.cpp takes beta_fast and beta_slow of YaRN from its command line, a file with others than {YARN_BETAS} would be computed wrongly",
            "format=gguf",
            "format=hf",
        )
    if cfg.num_experts and not cfg.norm_topk_prob:
        raise UserError(
            "llama.cpp always normalizes the routing weights, this model has norm_topk_prob=false",
            "format=gguf",
            "format=hf",
        )
    return cfg


def _decoder_arrays(model: LanguageModel, cfg: DecoderConfig, permuted: bool) -> dict[str, np.ndarray]:
    """Return the weights as llama.cpp stores them: the experts of a layer in one tensor, and for its llama the channels
    of a rotary pair side by side.
    """
    arrays: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in model.state_dict().items():
        if ".lora." in name or (cfg.tie_word_embeddings and name == "lm_head.weight"):
            continue
        array = tensor.detach().float().cpu().numpy()
        heads = cfg.num_attention_heads if ".q_proj." in name else cfg.num_key_value_heads if ".k_proj." in name else 0
        if permuted and heads:
            pairs = array.reshape(heads, 2, -1, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"model.layers.{match[1]}.mlp.experts.{match[3]}.weight", []).append(array)
        else:
            arrays[name] = array
    return arrays | {name: np.stack(parts) for name, parts in experts.items()}


def _llama3_factors(cfg: DecoderConfig) -> np.ndarray:
    """Return by what the frequency of each channel pair is divided, (H/2,)."""
    from models.layers.attention_block import rope_frequencies

    plain, scaled = rope_frequencies(dataclasses.replace(cfg, rope_scaling=None))[0], rope_frequencies(cfg)[0]
    return (plain / scaled).numpy().astype(np.float32)


def _add_settings(writer: GGUFWriter, cfg: DecoderConfig) -> None:
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_context_length(cfg.max_position_embeddings)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.num_hidden_layers)
    writer.add_feed_forward_length(
        cfg.moe_intermediate_size if cfg.num_experts and not cfg.qk_norm else cfg.intermediate_size
    )
    writer.add_head_count(cfg.num_attention_heads)
    writer.add_head_count_kv(cfg.num_key_value_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_layer_norm_rms_eps(cfg.rms_norm_eps)
    if cfg.num_experts:
        writer.add_expert_count(cfg.num_experts)
        writer.add_expert_used_count(cfg.num_experts_per_tok)
        writer.add_expert_feed_forward_length(cfg.moe_intermediate_size)
    scaling = cfg.rope_scaling
    if scaling is not None and scaling.type != "llama3":
        writer.add_rope_scaling_type(RopeScalingType.YARN if scaling.type == "yarn" else RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
        if scaling.type == "yarn":
            # llama.cpp multiplies this with the factor that YaRN derives from the extension
            writer.add_rope_scaling_attn_factors(scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1.0))
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
