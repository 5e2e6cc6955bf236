"""Multimodal classes of transformers, trained on text: the text model learns, towers and their projections stay out of
adapters, counts and updates.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TOKENIZER, lora_config, tokens
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_families import SIZES

from common.errors import UserError
from models.formats.json_files import read_model_config
from models.formats.load import add_run_adapter, load_into, load_model, load_weights
from models.formats.save import save_adapter, save_model
from models.language_model import LanguageModel, create_model
from models.lora import adapter_state_dict, lora_layers, merge_adapters
from runner.config.compose import compose_tree, to_config, without_hydra
from runner.engine.optim.groups import build_optimizer

TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT: dict[str, Any] = {**SIZES, "layer_types": None, "sliding_window": 8, "query_pre_attn_scalar": 8}
PER_LAYER = {
    "vocab_size_per_layer_input": 6400,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "global_head_dim": 8,
}
VISION = {"image_size": 28, "patch_size": 14}
CLASSES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT, "vision_config": TOWER | VISION, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": TEXT | PER_LAYER | {"layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": TOWER | {"head_dim": 8, "num_key_value_heads": 2},
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_proj_dims": 16,
            "subsampling_conv_channels": [4, 4],
        },
    },
}
PROJECTIONS = {"q_proj", "k_proj", "v_proj"}
IDS = tokens(2, 20)
names = pytest.mark.parametrize("name", ["gemma3", pytest.param("gemma4", marks=pytest.mark.slow)])


@pytest.fixture
def base(name: str, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **CLASSES[name]))
    for p in hf.parameters():
        torch.nn.init.normal_(p, std=0.2)
    hf.save_pretrained(tmp_path / "base")
    for file in TOKENIZER.iterdir():
        shutil.copy(file, tmp_path / "base")
    return tmp_path / "base"


def model_of(base: Path) -> LanguageModel:
    model = create_model(read_model_config(base))
    load_into(model, load_weights(base), str(base))
    return model.train()


def adapted(base: Path, targets: list[str]) -> LanguageModel:
    model = model_of(base)
    add_run_adapter(model, lora_config(rank=4, alpha=8.0, dropout=0.0, targets=targets), str(base))
    with torch.no_grad():
        for matrix in adapter_state_dict(model).values():
            matrix.normal_(std=0.1)
    return model


@pytest.mark.slow
@names
def test_multimodal_model_updates_and_counts_what_text_uses(name: str, base: Path) -> None:
    model = model_of(base)
    model(IDS, IDS, reduction="sum").nll.backward()
    with_gradient = {path for path, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient == {path for path, _ in model.named_parameters() if model.is_used_by_text(path)}
    assert (
        any("vision_tower" in path for path in model.modules_unused_by_text)
        and "lm_head" not in model.modules_unused_by_text
    )
    optimizer = build_optimizer(
        to_config(without_hydra(compose_tree(["stage=pretrain", "optimizer=adamw"]))).optimizer,
        model,
        model.cfg.num_hidden_layers,
    )
    assert set(optimizer.names.values()) == with_gradient


@names
@pytest.mark.parametrize(
    "targets",
    [["q_proj", "k_proj", "v_proj", "o_proj"], ["all-linear"], ["0.self_attn.q_proj"], ["re:.*(k|v)_proj.*"]],
    ids=str,
)
def test_multimodal_adapters_of_every_target_are_those_of_text(name: str, targets: list[str], base: Path) -> None:
    layers = lora_layers(adapted(base, targets))
    assert all(".language_model." in path for path in layers)
    found = {path.rsplit(".", 1)[-1] for path in layers}
    assert (
        found
        >= (
            PROJECTIONS
            if targets in (["all-linear"], ["q_proj", "k_proj", "v_proj", "o_proj"])
            else found & PROJECTIONS
        )
        and found & PROJECTIONS
    )


@names
def test_multimodal_target_that_text_does_not_use_is_refused(name: str, base: Path) -> None:
    with pytest.raises(UserError, match="vision_tower.* is not used by text") as refused:
        adapted(base, ["re:.*vision_tower.*q_proj.*"])
    assert "vision_tower" not in refused.value.fix


@names
@pytest.mark.parametrize(
    "targets",
    [
        ["all-linear"],
        pytest.param(["q_proj", "k_proj", "v_proj", "o_proj"], marks=pytest.mark.slow),
        pytest.param(["0.self_attn.q_proj"], marks=pytest.mark.slow),
    ],
    ids=str,
)
@torch.no_grad()
def test_multimodal_adapter_and_merged_model_have_the_logits_of_peft(
    name: str, targets: list[str], base: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = adapted(base, targets).eval()
    expected = model(IDS).logits
    save_adapter(
        tmp_path / "adapter", model, lora_config(rank=4, alpha=8.0, dropout=0.0, targets=targets), str(base), TOKENIZER
    )
    hf = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    assert torch.allclose(hf(IDS).logits, expected, atol=1e-4)
    matrices = {path.replace(".default", "") for path, _ in hf.named_parameters() if "lora_" in path}
    assert len(matrices) == len(adapter_state_dict(model))
    assert torch.allclose(load_model(tmp_path / "adapter")(IDS).logits, expected, atol=1e-5)
    merge_adapters(model)
    save_model(tmp_path / "merged", model, model.cfg, TOKENIZER)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert torch.allclose(merged(IDS).logits, expected, atol=1e-4)
    assert {path for path, _ in merged.named_parameters()} == {
        path for path, _ in AutoModelForCausalLM.from_pretrained(base).named_parameters()
    }


@pytest.mark.slow
@names
@torch.no_grad()
def test_multimodal_adapter_of_peft_on_a_tower_is_read(name: str, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    targets = [path for path in model_of(base).modules_unused_by_text if "vision" in path]
    hf = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    both = [
        path
        for path, module in hf.named_modules()
        if type(module) is torch.nn.Linear and (path.startswith(tuple(targets)) or path.endswith("0.mlp.up_proj"))
    ]
    whole = peft.get_peft_model(
        hf, peft.LoraConfig(r=4, target_modules=both, task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval()
    whole.save_pretrained(tmp_path / "adapter")
    assert torch.allclose(load_model(tmp_path / "adapter")(IDS).logits, whole(IDS).logits, atol=1e-4)
