"""config.json of the transformers architectures that the decoder computes: read into the decoder's settings, and
written from them.

Settings are a dict with the fields of `DecoderConfig`. A field of config.json is either read, or has no influence on
the mathematics, or has its neutral value; any other is refused by name: nothing that a model needs is ignored.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.errors import UserError
from models.config import UnsupportedVariantError

Settings = dict[str, Any]

REQUIRED_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
# Fields that every family may lack, with the values of transformers for absent ones
OPTIONAL_FIELDS: Settings = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "num_key_value_heads": None,
    "head_dim": None,
}
ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
# Fields of rotary position embeddings by rope_type
SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
FIX = "choose a model of a supported family: docs/reference/models.md"

NO_BIASES: Settings = {"attention_bias": False, "mlp_bias": False}
ANY_WINDOW: Settings = {"use_sliding_window": False, "sliding_window": 4096}
EXPERT_FIELDS: Settings = {"router_aux_loss_coef": 0.001}

# model_type -> (transformers class, the fields that it reads besides those above, or with other values for absent ones).
# A field that is not named here or above must have its neutral value.
FAMILIES: dict[str, tuple[str, Settings]] = {
    "llama": ("LlamaForCausalLM", NO_BIASES),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "ministral": ("MinistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None}),
    "qwen2": ("Qwen2ForCausalLM", {"num_key_value_heads": 32, "layer_types": None, **ANY_WINDOW}),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, "layer_types": None, **ANY_WINDOW},
    ),
    # it reads the last field for rope_type=longrope only
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None, "original_max_position_embeddings": 4096}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            **NO_BIASES,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            **ANY_WINDOW,
        },
    ),
    "internlm3": ("LlamaForCausalLM", {"num_key_value_heads": 2, "head_dim": 128, **NO_BIASES}),
    "iquestcoder": ("LlamaForCausalLM", {"num_key_value_heads": 8, "head_dim": 128, **NO_BIASES}),
    "seed_oss": (
        "SeedOssForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_dropout": 0.1,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
    ),
    "cwm": (
        "CwmForCausalLM",
        {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_bias": False,
            "rope_theta": 1e6,
            "sliding_window": 8192,
            "layer_types": None,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_key_value_heads": 4,
            "attention_bias": False,
            **ANY_WINDOW,
            **EXPERT_FIELDS,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "sliding_window": None,
            **EXPERT_FIELDS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
}
MOE_TYPES = ("qwen3_moe", "mixtral")
QK_NORM_TYPES = ("qwen3", "qwen3_moe")
# other names of one field
ALIASES = {"num_local_experts": "num_experts", "qkv_bias": "attention_bias", "bias": "mlp_bias"}

# Values with which a field that a family does not read changes nothing; null always counts as absent
NEUTRAL_VALUES: Settings = {
    "attention_bias": False,
    "attention_out_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_jitter_noise": 0.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "use_qk_norm": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "no_rope_layers": [],
    "layer_types": [],
}

# Fields that change no logit: names and versions, token ids, storage, initialization, outputs, dropout (model.dropout
# sets it), generation,
# and settings of a sliding window that is not used. tests/models/test_hf_families.py compares with transformers.
NO_INFLUENCE = frozenset(
    """
    model_type architectures _name_or_path name_or_path transformers_version auto_map tokenizer_class is_llama_config transformers.js_config
    unsloth_version unsloth_fixed unsloth_training_framework task_specific_params finetuning_task prefix problem_type id2label label2id num_labels
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id cls_token_id decoder_start_token_id
    torch_dtype dtype use_cache torchscript return_dict return_dict_in_generate output_scores output_hidden_states output_attentions
    output_router_logits _attn_implementation _attn_implementation_internal attn_implementation _flash_attn_2_enabled use_flash_attn
    initializer_range pretraining_tp chunk_size_feed_forward resid_pdrop embd_pdrop residual_dropout dropout tf_legacy_loss use_bfloat16
    max_window_layers
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)


def read_hf_config(raw: dict[str, Any], path: Path) -> Settings:
    """Return the settings of the model in a config.json.

    Raises UserError for what the decoder does not compute; KeyError for a missing field.
    """
    model_type = raw["model_type"]
    architecture, own_fields = FAMILIES[model_type]
    fields = _resolve_aliases(raw, path)
    family = f"{model_type} ({architecture})"
    _check_all_known(fields, own_fields, family, path)
    given, fields = fields, OPTIONAL_FIELDS | own_fields | fields
    missing = [name for name in REQUIRED_FIELDS if fields.get(name) is None]
    if missing:
        raise KeyError(", ".join(missing))
    heads, max_positions = fields["num_attention_heads"], fields["max_position_embeddings"]
    _check_attention_window(fields, max_positions, family, path)
    if fields["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedVariantError(
            f"{family} with hidden_act={fields['hidden_act']} is not supported, only silu", path, FIX
        )
    if model_type == "cwm" and not (given.get("rope_parameters") or given.get("rope_scaling")):
        raise KeyError("rope_parameters")  # its default is a scaling
    is_moe, bias = model_type in MOE_TYPES, bool(fields.get("attention_bias"))
    return {
        "family": "decoder",
        "name": path.parent.name,
        **{name: fields[name] for name in REQUIRED_FIELDS},
        "num_key_value_heads": fields["num_key_value_heads"] or heads,
        "head_dim": fields["head_dim"] or fields["hidden_size"] // heads,
        "tie_word_embeddings": bool(fields["tie_word_embeddings"]),
        **read_rope(given, fields["rope_theta"] or OPTIONAL_FIELDS["rope_theta"], max_positions, family, path),
        "qk_norm": model_type in QK_NORM_TYPES,
        "attention_bias": True if model_type == "qwen2" else bias,
        "attention_out_bias": bool(fields["attention_out_bias"]) if model_type == "seed_oss" else bias,
        "mlp_bias": bool(fields.get("mlp_bias")),
        "dropout": fields["attention_dropout"] or 0.0,
        "attention": "auto",
        "num_experts": fields["num_experts"] if is_moe else 0,
        "num_experts_per_tok": fields["num_experts_per_tok"] if is_moe else 1,
        "moe_intermediate_size": (fields.get("moe_intermediate_size") or fields["intermediate_size"]) if is_moe else 0,
        "norm_topk_prob": bool(fields.get("norm_topk_prob", True)) if is_moe else False,
        "router_aux_loss_coef": fields["router_aux_loss_coef"]
        if is_moe and fields.get("output_router_logits") is not False
        else 0.0,
    }


def _resolve_aliases(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        name = ALIASES.get(name, name)
        if fields.setdefault(name, value) != value:
            raise UnsupportedVariantError(
                f"{name} is given twice, as {fields[name]} and {value}", path, "remove the one that is not meant"
            )
    return fields


def _check_all_known(fields: dict[str, Any], own_fields: Settings, family: str, path: Path) -> None:
    read = {*REQUIRED_FIELDS, *OPTIONAL_FIELDS, *ROPE_FIELDS, *own_fields} | NO_INFLUENCE
    unknown = {name: value for name, value in fields.items() if name not in read and value is not None}
    unsupported = {
        name: value
        for name, value in unknown.items()
        if name in NEUTRAL_VALUES and value not in ([], NEUTRAL_VALUES[name])
    }
    if "layer_types" in unsupported and set(unsupported["layer_types"]) == {"full_attention"}:
        del unsupported["layer_types"]
    if unsupported:
        raise UnsupportedVariantError(f"{family} with {list_fields(unsupported)} is not supported", path, FIX)
    if unknown := {name: value for name, value in unknown.items() if name not in NEUTRAL_VALUES}:
        raise UnsupportedVariantError(
            f"{len(unknown)} fields of {family} are not known to this program: {list_fields(unknown)}",
            path,
            "they may change what the model computes; delete those that do not from a copy of the file, or choose another model",
        )


def _check_attention_window(fields: dict[str, Any], max_positions: int, family: str, path: Path) -> None:
    """Refuse windows shorter than the longest sequence, and layers without rotary position embeddings."""
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window is not None and window < max_positions:
        raise UnsupportedVariantError(
            f"{family} with sliding_window={window} is not supported: it is shorter than max_position_embeddings={max_positions}",
            path,
            f"{FIX}; or set max_position_embeddings={window} in a copy of the file, to train on shorter sequences",
        )
    if window is None and (others := set(fields.get("layer_types") or ()) - {"full_attention"}):
        raise UnsupportedVariantError(
            f"{family} with layer_types of {', '.join(sorted(map(str, others)))} is not supported", path, FIX
        )
    layers, interval = fields["num_hidden_layers"], fields.get("no_rope_layer_interval")
    listed = fields.get("no_rope_layers")
    if not all(listed[:layers]) if listed else interval and layers >= abs(interval):
        raise UnsupportedVariantError(
            f"{family} with layers without rotary position embeddings (no_rope_layers) is not supported", path, FIX
        )


# --- rotary position embeddings, of transformers 4 and 5 ---


def read_rope(given: dict[str, Any], default_theta: float, max_positions: int, family: str, path: Path) -> Settings:
    """Return rope_theta and rope_scaling (a dict, or None) from `rope_parameters` of transformers 5, or `rope_scaling`
    and `rope_theta` of 4.
    """
    results: list[Settings] = []
    for section in ("rope_scaling", "rope_parameters"):
        if given.get(section) or (section == "rope_parameters" and not results):
            rope = {name: value for name, value in (given.get(section) or {}).items() if value is not None}
            for name in ("rope_theta", "partial_rotary_factor"):
                if rope.setdefault(name, given.get(name)) != given.get(name, rope[name]):
                    raise UserError(
                        f"{name} is given twice, as {given[name]} and, in {section}, {rope[name]}",
                        path,
                        "remove the wrong one",
                    )
            results.append(_resolve_rope(rope, default_theta, max_positions, family, path))
    if results[0] != results[-1]:
        raise UserError(
            f"rope_scaling and rope_parameters contradict each other: {results[0]} and {results[-1]}",
            path,
            "remove the wrong one",
        )
    return results[0]


def _resolve_rope(rope: dict[str, Any], default_theta: float, max_positions: int, family: str, path: Path) -> Settings:
    kind = str(rope.pop("type", "default"))
    kind = str(rope.pop("rope_type", kind))
    theta, share = rope.pop("rope_theta") or default_theta, rope.pop("partial_rotary_factor")
    scaling = {name: rope.pop(name) for name in SCALING_FIELDS.get(kind, ()) if name in rope}
    if kind == "yarn":
        mscale, mscale_all_dim = rope.pop("mscale", None), rope.pop("mscale_all_dim", None)
        if rope.get("truncate"):
            del rope["truncate"]
    if kind not in SCALING_FIELDS or rope:
        details = f"{list_fields({'rope_type': kind, **rope})} for rotary position embeddings"
        raise UnsupportedVariantError(
            f"{family} with {details} is not supported",
            path,
            f"{FIX}; supported rope_type: {', '.join(SCALING_FIELDS)}",
        )
    if share not in (None, 1):
        raise UnsupportedVariantError(
            f"{family} with partial_rotary_factor={share} is not supported, only 1", path, FIX
        )
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    if kind in ("yarn", "llama3"):
        scaling.setdefault("original_max_position_embeddings", max_positions)
    if kind == "yarn":
        scaling.setdefault("attention_factor", _yarn_attention_factor(scaling["factor"], mscale, mscale_all_dim))
        scaling |= {"beta_fast": scaling.get("beta_fast") or 32.0, "beta_slow": scaling.get("beta_slow") or 1.0}
    if missing := [name for name in SCALING_FIELDS[kind] if name not in scaling]:
        raise KeyError(", ".join(missing))
    return {"rope_theta": float(theta), "rope_scaling": {"type": kind, **scaling}}


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor on cos and sin that transformers derives (https://arxiv.org/abs/2309.00071, equation 22)."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def list_fields(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={str(value)[:60]}" for name, value in fields.items())


# --- from settings to config.json ---


def architecture_of(settings: Settings) -> str | None:
    """Return the model_type that computes the same as these settings of the decoder, None if transformers has none."""
    biases = (settings["attention_bias"], settings["attention_out_bias"], settings["mlp_bias"])
    same_biases = biases in ((False, False, False), (True, True, False))
    if settings["num_experts"]:
        if settings["qk_norm"]:
            return "qwen3_moe" if same_biases else None
        return "mixtral" if not any(biases) and settings["norm_topk_prob"] else None
    if settings["qk_norm"]:
        return "qwen3" if same_biases else None
    if biases == (True, False, False):
        return "qwen2"
    # transformers requires it of a Llama
    if biases[0] == biases[1] and settings["hidden_size"] % settings["num_attention_heads"] == 0:
        return "llama"
    return "seed_oss" if any(biases) else "mistral"


def write_hf_config(settings: Settings) -> dict[str, Any]:
    """Return the content of config.json for transformers 4 and 5, which have different names for the rotary settings
    and the dtype.
    """
    model_type = settings["model_type"] or architecture_of(settings)
    assert model_type is not None  # DecoderConfig refuses such settings
    architecture, own_fields = FAMILIES[model_type]
    scaling = settings["rope_scaling"]
    if scaling is not None:
        scaling = {"rope_type": scaling["type"], **{name: scaling[name] for name in SCALING_FIELDS[scaling["type"]]}}
    content = {
        "architectures": [architecture],
        "model_type": model_type,
        **{name: settings[name] for name in (*REQUIRED_FIELDS, "tie_word_embeddings", "rope_theta")},
        "num_key_value_heads": settings["num_key_value_heads"],
        "head_dim": settings["head_dim"],
        **{name: settings.get(name) for name in own_fields if name not in ANY_WINDOW},
        "hidden_act": "silu",
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings["rope_theta"]} | (scaling or {}),
        "attention_dropout": settings["dropout"],
        "torch_dtype": "float32",
        "dtype": "float32",
        **{name: False if name == "use_sliding_window" else None for name in own_fields if name in ANY_WINDOW},
    }
    if settings["model_type"]:
        content |= _without_defaults(model_type, settings["num_hidden_layers"], settings["max_position_embeddings"])
    if model_type == "qwen3_moe":
        content |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if model_type == "mixtral":
        content["num_local_experts"], content["intermediate_size"] = (
            content.pop("num_experts"),
            settings["moe_intermediate_size"],
        )
    return content


def _without_defaults(model_type: str, layers: int, length: int) -> Settings:
    """Return the fields whose defaults in transformers are not those of the decoder: windows, layers without rotary
    embeddings, ids of tokens beyond a small vocabulary. `length`: of the longest sequence.
    """
    full_attention = {"sliding_window": length, "layer_types": ["full_attention"] * layers}
    fields: dict[str, Settings] = {
        "ministral": full_attention,
        "cwm": full_attention,
        "phi3": {"original_max_position_embeddings": length, "pad_token_id": None},
        "smollm3": {"no_rope_layers": [1] * layers, "no_rope_layer_interval": layers + 1, "pad_token_id": None},
    }
    return fields.get(model_type, {})
