"""Adapters of PEFT are computed, merged, trained and written as PEFT does, for models of transformers and the decoder;
other variants are refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TOKENIZER, lora_config, random_model, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers_families import write_family

from common.errors import UserError
from models.formats.json_files import read_adapter_settings, read_json_file, read_model_config, write_json_file
from models.formats.load import add_run_adapter, continue_adapter, load_into, load_model, load_weights
from models.formats.peft import _values_by_layer
from models.formats.save import save_adapter, save_model
from models.formats.tensor_files import read_tensors, write_tensors
from models.language_model import create_model
from models.lora import adapter_state_dict, add_lora, lora_warnings

peft = pytest.importorskip("peft")

IDS = tokens(2, 12)
VARIANTS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
SLOW = [
    pytest.param(name, variant, marks=pytest.mark.slow)
    for name in ("llama", "gemma3_text", "gpt_neox", "phi3")
    for variant in VARIANTS
]


@pytest.fixture
def name() -> str:
    return "qwen2"


@pytest.fixture
def base(name: str, tmp_path: Path) -> Path:
    write_family(folder := tmp_path / "base", name)
    weights = read_tensors(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(2)
    write_tensors(
        folder / "model.safetensors",
        {path: p + 0.1 * torch.randn(p.shape, generator=noise) if "bias" in path else p for path, p in weights.items()},
    )
    return folder


def base_of_peft(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_with_peft(base: Path, folder: Path, **settings: Any) -> Any:
    """Write an adapter of PEFT with random values; return its model."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(base_of_peft(base), peft.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                noise = 0.1 * torch.randn(p.shape, generator=generator)
                p.copy_(noise if "lora_A" in name or "lora_B" in name else p + noise)
    model.save_pretrained(folder)
    return model


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name, variant", [("gpt2", "dora"), ("qwen2", "rslora"), *SLOW])
@torch.no_grad()
def test_peft_adapter_has_the_logits_and_weights_of_peft(name: str, variant: str, base: Path, tmp_path: Path) -> None:
    reference = train_with_peft(base, tmp_path / "peft", **VARIANTS[variant])
    expected = reference(IDS).logits
    model = load_model(tmp_path / "peft", "transformers")
    assert torch.equal(model(IDS).logits, expected)
    assert difference(load_model(tmp_path / "peft")(IDS).logits, expected) < 1e-6  # our decoder, if it has the family
    settings = lora_config(**read_adapter_settings(tmp_path / "peft"))
    save_adapter(tmp_path / "ours", model, settings, str(base), TOKENIZER)
    again = peft.PeftModel.from_pretrained(base_of_peft(base), tmp_path / "ours")
    assert torch.equal(again(IDS).logits, expected)
    merged, own = dict(reference.merge_and_unload().named_parameters()), load_weights(tmp_path / "peft", "transformers")
    assert max(difference(p, own[path]) for path, p in merged.items()) < 1e-6


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_new_adapter_has_the_output_and_the_gradients_of_peft(name: str, base: Path, tmp_path: Path) -> None:
    reference = train_with_peft(base, tmp_path / "peft", use_dora=True)
    model = load_model(base, "transformers")
    before = model(IDS).logits
    add_lora(model, lora_config(4, 6.0, 0.0, ["all-linear"], dora=True))
    assert torch.equal(model(IDS).logits, before)
    model = load_model(tmp_path / "peft", "transformers")
    for output in (model(IDS).logits, reference(IDS).logits):
        torch.nn.functional.cross_entropy(output.flatten(0, 1), IDS.flatten()).backward()
    own = {path: p.grad for path, p in adapter_state_dict(model).items()}
    assert len(own) == sum(p.grad is not None for p in reference.parameters())
    names = {
        "A": "lora_A.default.weight",
        "B": "lora_B.default.weight",
        "magnitude": "lora_magnitude_vector.default.weight",
    }
    for path, grad in own.items():
        layer, _, matrix = path.rpartition(".lora.default.")
        assert grad is not None
        assert difference(grad, reference.get_parameter(f"base_model.model.{layer}.{names[matrix]}").grad) < 1e-6


@pytest.mark.slow
@torch.no_grad()
def test_saved_adapter_of_a_mixture_of_experts_is_loaded_by_peft(tmp_path: Path) -> None:
    model = random_model(std=0.1, num_experts=4, moe_intermediate_size=40, num_experts_per_tok=2)
    save_model(tmp_path / "base", model, model.cfg, TOKENIZER)
    cfg = lora_config(4, 8.0, 0.0, ["q_proj", "gate_proj", "up_proj", "down_proj"])
    add_lora(model, cfg)
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.1)
    save_adapter(tmp_path / "adapter", model, cfg, str(tmp_path / "base"), TOKENIZER)
    reference = peft.PeftModel.from_pretrained(base_of_peft(tmp_path / "base"), tmp_path / "adapter")
    assert difference(reference(IDS).logits, model(IDS).logits) < 1e-5


@torch.no_grad()
def test_adapter_of_a_shared_expert_that_peft_misreads_is_a_warning(tmp_path: Path) -> None:
    write_family(tmp_path / "base", "deepseek_v3")
    misread = []
    for targets in (["o_proj"], ["all-linear"]):
        model, cfg = load_model(tmp_path / "base"), lora_config(4, 8.0, 0.0, targets)
        add_lora(model, cfg)
        for p in adapter_state_dict(model).values():
            torch.nn.init.normal_(p, std=0.1)
        save_adapter(tmp_path / targets[0], model, cfg, str(tmp_path / "base"), TOKENIZER)
        reference = peft.PeftModel.from_pretrained(base_of_peft(tmp_path / "base"), tmp_path / targets[0])
        misread.append(difference(reference(IDS).logits, model(IDS).logits) > 1e-5)
        assert misread[-1] == any("down_proj, gate_proj, up_proj as those of" in x for x in lora_warnings(model, cfg))
    assert misread == [False, True]


@torch.no_grad()
def test_peft_adapter_with_patterns_biases_and_saved_modules_is_computed(base: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"^model.layers.0.self_attn.v_proj": 12}}
    reference = train_with_peft(
        base, tmp_path / "peft", target_modules=r".*(q|v)_proj", bias="all", modules_to_save=["lm_head"], **patterns
    )
    expected = reference(IDS).logits
    model = load_model(tmp_path / "peft", "transformers")
    assert torch.equal(model(IDS).logits, expected)
    merged = create_model(model.cfg)
    load_into(merged, load_weights(tmp_path / "peft", "transformers"), "")
    assert difference(merged(IDS).logits, expected) < 1e-5
    with pytest.raises(UserError, match="no adapter of this program trains on: lm_head.weight"):
        continue_adapter(load_model(base), tmp_path / "peft", 0.0)


@torch.no_grad()
def test_continued_adapter_keeps_its_ranks_and_names(base: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "target_modules": ["0.mlp.up_proj", "q_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {r"layers.\d+.self_attn.q_proj": 3},
    }
    reference = train_with_peft(base, tmp_path / "peft", **settings)
    model = load_model(base, "transformers")
    continue_adapter(model, tmp_path / "peft", 0.0)
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    cfg = lora_config(**read_adapter_settings(tmp_path / "peft"))
    save_adapter(tmp_path / "ours", model, cfg, str(base), TOKENIZER)
    again = peft.PeftModel.from_pretrained(base_of_peft(base), tmp_path / "ours")
    assert torch.equal(again(IDS).logits, reference(IDS).logits)
    assert read_json_file(tmp_path / "ours" / "adapter_config.json")["target_modules"] == [
        "model.layers.0.mlp.up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights=pissa is not supported: the adapter fits a changed base model",
        ),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters="),
        ({"a_field_of_the_future": {"of": "peft"}}, "a_field_of_the_future="),
        ({"peft_type": "IA3"}, "peft_type=IA3"),
        ({"alpha_pattern": {"(a+)+b": 2}}, "alpha_pattern has the regular expression"),
        ({"r": 5}, "is no adapter of rank r=5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_peft_adapter_of_another_variant_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, cfg = random_model(), lora_config(4, 8.0, 0.0, ["q_proj"])
    add_lora(model, cfg)
    save_adapter(tmp_path, model, cfg, "scratch", TOKENIZER)
    path = tmp_path / "adapter_config.json"
    write_json_file(path, read_json_file(path) | changes)
    for load in (load_model, load_weights):
        with pytest.raises(UserError) as error:
            load(tmp_path)
        assert message in error.value.message and error.value.setting == str(path)


def test_digits_in_a_pattern_of_an_adapter_are_matched_once(tmp_path: Path) -> None:
    def values(key: str, *layers: str) -> list[int]:
        return [*_values_by_layer({"rank_pattern": {key: 2}}, "rank_pattern", 8, list(layers), tmp_path).values()]

    assert values(r"\d+" * 20, "1" * 200 + "x") == [8], "never ends if each way to divide the digits is tried"
    assert values(r"layers.\d+.q", "model.layers.12.q", "model.layers.x.q") == [2, 8]
    with pytest.raises(UserError, match="rank_pattern has too many keys, 1,000 for 1 layers"):
        keys = {"a" * 100 + str(i): 2 for i in range(1000)}
        _values_by_layer({"rank_pattern": keys}, "rank_pattern", 8, ["0." * 5000], tmp_path)


@pytest.mark.parametrize("name", ["gpt2"])
def test_peft_adapter_of_a_tied_output_layer_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    train_with_peft(base, tmp_path / "peft", target_modules=["lm_head"])
    assert read_model_config(base).tie_word_embeddings
    for load in (load_model, load_weights):
        with pytest.raises(UserError, match="lm_head shares its weight with the embedding"):
            load(tmp_path / "peft")


@pytest.mark.parametrize("family", ["decoder", "transformers"])
@torch.no_grad()
def test_peft_adapter_with_a_saved_embedding_needs_the_same_output_layer(family: str, tmp_path: Path) -> None:
    write_family(base := tmp_path / "base", "qwen2", tie_word_embeddings=True)
    train_with_peft(base, folder := tmp_path / "peft", modules_to_save=["embed_tokens"])
    for load in (
        load_model,
        lambda *args: load_into(create_model(read_model_config(base, family)), load_weights(*args), ""),
    ):
        with pytest.raises(UserError, match="these weights are not tied"):  # as PEFT computes them
            load(folder, family)
    path = folder / "adapter_model.safetensors"
    stored = read_tensors(path)
    embedding = stored["base_model.model.model.embed_tokens.weight"]
    write_tensors(path, stored | {"base_model.model.lm_head.weight": embedding.clone()})  # ensure_weight_tying=true
    assert torch.equal(load_weights(folder, family)["lm_head.weight"], embedding)
    assert torch.equal(load_model(folder, family).state_dict()["lm_head.weight"], embedding)


def test_adapter_is_added_to_a_model_of_transformers_without_data(tmp_path: Path) -> None:
    write_family(tmp_path, "gpt2")
    with torch.device("meta"):  # as plan.py does
        model = create_model(read_model_config(tmp_path))
        add_run_adapter(model, lora_config(targets=["all-linear"]), "scratch")
    assert adapter_state_dict(model)


def test_adapter_of_a_layer_that_is_never_called_is_refused(tmp_path: Path) -> None:
    write_family(tmp_path, "mamba", state_size=8)
    model = load_model(tmp_path)
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="adapters of dt_proj would have no effect") as error:
        add_run_adapter(model, lora_config(targets=["all-linear"]), "scratch")
    assert error.value.fix == "stage.lora.targets=[in_proj,out_proj,x_proj]"
    torch.set_rng_state(state)
    add_lora(load_model(tmp_path), lora_config(targets=["in_proj"]))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    add_run_adapter(load_model(tmp_path), lora_config(targets=["in_proj"]), "scratch")
    assert torch.equal(torch.get_rng_state(), after)


def test_lora_settings_of_an_adapter_are_those_of_peft(tmp_path: Path) -> None:
    model, cfg = random_model(), lora_config(4, 8.0, 0.0, ["q_proj", "v_proj"], rslora=True, dora=True)
    add_lora(model, cfg)
    save_adapter(tmp_path, model, cfg, "scratch", TOKENIZER)
    assert lora_config(**read_adapter_settings(tmp_path)) == dataclasses.replace(cfg)
    with pytest.raises(UserError, match="init_from is no adapter"):
        read_adapter_settings(tmp_path / "base")
