"""Small random models of transformers: folders of the families that load, and changes of their config.json."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers_families import randomize_frozen

V = 64
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_dropout": 0.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 50.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
}
# name -> (model_type, changes of SIZES)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    **{f"llama_{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_long_window": ("mistral", {"sliding_window": 64, "head_dim": 16}),
    "ministral": ("ministral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied_yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": ROPES["yarn"]}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied_bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1]}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {}),
    "seed_oss": ("seed_oss", {}),
    "cwm": ("cwm", {"sliding_window": 64, "rope_parameters": ROPES["llama3"]}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe_plain_top_one": (
        "qwen3_moe",
        {"norm_topk_prob": False, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral_tied": ("mixtral", {"tie_word_embeddings": True}),
}
IDS = torch.randint(3, V, (2, 48), generator=torch.Generator().manual_seed(1))


def hf_config(model_type: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)} | {"head_dim"}
    sizes = {
        name: value
        for name, value in SIZES.items()
        if name in known and not (name == "head_dim" and model_type in ("phi3", "qwen2", "smollm3"))
    }
    return cls(**copy.deepcopy(sizes | changes))


def write_folder(folder: Path, model_type: str, **changes: Any) -> nn.Module:
    """Write a model with weights so large that every part of it matters; return it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(model_type, **changes), attn_implementation="eager")
    for name, p in model.named_parameters():
        nn.init.normal_(p, mean=1.0 if p.ndim == 1 and not name.endswith("bias") else 0.0, std=0.2)
    randomize_frozen(model)
    model.save_pretrained(folder)
    return model.eval()


def rewritten(folder: Path, target: Path, **changes: Any) -> Path:
    """Copy a model folder with other values in its config.json; a value of `...` removes the field."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "model.safetensors").hardlink_to(folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))
    return target


@torch.no_grad()
def reference_logits(folder: Path, model: nn.Module | None = None) -> Tensor:
    """Return the logits of transformers; with `model`, of its weights under the config.json of `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if model is None:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(IDS).logits
    other = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    other.load_state_dict(model.state_dict())
    return other.eval()(IDS).logits


@torch.no_grad()
def our_logits(folder: Path) -> Tensor:
    from models.formats.load import load_model

    return load_model(folder)(IDS).logits


def changed_values(fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, change of config.json) of every numeric and boolean field: another value, and without it; those of
    rotary embeddings too.
    """
    changes: list[tuple[str, dict[str, Any]]] = []
    for name, value in fields.items():
        if name == "rope_parameters":
            for inner, old in value.items():
                changes += [(f"{name}.{inner}={new}", {name: value | {inner: new}}) for new in _other_values(old)]
                changes.append(
                    (f"{name} without {inner}", {name: {key: item for key, item in value.items() if key != inner}})
                )
        else:
            changes += [(f"{name}={new}", {name: new}) for new in _other_values(value)]
        changes.append((f"without {name}", {name: ...}))
    return changes


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 or 1, *([value // 2] if value > 1 else [])]
    return [value * 1.5 or 0.5] if isinstance(value, float) else []
