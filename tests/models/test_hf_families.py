"""Folders of transformers: the families that load have its logits, all others are refused by name, and no field of
config.json is ignored.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_families import IDS, MODELS, changed_values, hf_config, our_logits, reference_logits, rewritten, write_folder
from tiny_models import TOKENIZER, max_difference, random_model

from common.errors import UserError
from models.families.hf_config import FAMILIES, NO_INFLUENCE
from models.formats.json_files import read_json_file, read_model_config
from models.formats.load import load_model
from models.formats.save import save_model
from models.formats.tensor_files import read_tensors, to_decoder_names, to_folder_names

FAST = ("llama_llama3", "mixtral", "mistral", "phi3", "smollm3")
OTHER_FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "gpt2",
    "olmo2",
    "olmoe",
    "deepseek_v3",
    "glm4",
    "qwen2_moe",
    "qwen3_next",
    "gpt_oss",
    "llama4",
)
# Fields that are read and change no logit of some model: of training, of a limit, of a window that is not shorter, of
# parts that it does not have
READ_WITHOUT_INFLUENCE = {
    *(
        "attention_dropout",
        "router_aux_loss_coef",
        "max_position_embeddings",
        "sliding_window",
        "use_sliding_window",
        "head_dim",
    ),
    *(
        "rope_parameters.original_max_position_embeddings",
        "intermediate_size",
        "original_max_position_embeddings",
        "no_rope_layer_interval",
    ),
}
# names of classes, types and functions
UNTESTED_FIELDS = {"model_type", "auto_map", "dtype", "id2label", "_attn_implementation"}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_family_has_the_logits_of_transformers_also_after_export(name: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    write_folder(tmp_path / "folder", model_type, **changes)
    reference = reference_logits(tmp_path / "folder")
    model = load_model(tmp_path / "folder")
    with torch.no_grad():
        assert max_difference(model(IDS).logits, reference) < 1e-5
    save_model(tmp_path / "export", model, model.cfg, TOKENIZER)
    assert max_difference(reference_logits(tmp_path / "export"), reference) < 1e-5
    assert max_difference(our_logits(tmp_path / "export"), reference) < 1e-5
    (before, tensors), (after, exported) = (
        (read_json_file(tmp_path / folder / "config.json"), read_tensors(tmp_path / folder / "model.safetensors"))
        for folder in ("folder", "export")
    )
    assert [after[field] for field in ("model_type", "architectures")] == [
        before[field] for field in ("model_type", "architectures")
    ]
    assert {path: tensor.shape for path, tensor in exported.items()} == {
        path: tensor.shape for path, tensor in tensors.items()
    }


def test_families_that_load_are_at_least_twelve() -> None:
    assert {model_type for model_type, _ in MODELS.values()} == set(FAMILIES) and len(FAMILIES) >= 12


@pytest.mark.parametrize("model_type", OTHER_FAMILIES)
def test_other_family_goes_through_transformers(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 32}))
    assert read_model_config(tmp_path).family == "transformers"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba9"}, "transformers has no model_type mamba9"),
        (
            {"model_type": "mamba9", "auto_map": {"AutoModelForCausalLM": "code.Model"}},
            "transformers has no model_type mamba9",
        ),
        ({"model_type": "t5"}, "model_type t5 is no causal language model"),
        ({"model_type": "gemma", "quantization_config": {"bits": 4}}, "quantized weights cannot be trained"),
        ({"model_type": ["llama"]}, "a field is missing or has another type"),
    ],
)
def test_model_without_a_causal_class_of_transformers_is_refused_by_name(
    changes: dict, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(changes))
    with pytest.raises(UserError, match=message) as error:
        read_model_config(tmp_path)
    assert error.value.setting == str(tmp_path / "config.json")


def test_variant_that_the_decoder_does_not_compute_goes_through_transformers(tmp_path: Path) -> None:
    write_folder(tmp_path, "mistral", sliding_window=8)
    assert read_model_config(tmp_path).family == "transformers"
    reference = reference_logits(tmp_path)
    with torch.no_grad():
        assert max_difference(load_model(tmp_path)(IDS).logits, reference) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name in FAMILIES or name.startswith("llama_")])
def test_no_field_of_config_json_is_ignored(name: str, tmp_path: Path) -> None:
    """A changed or missing field changes the logits as in transformers, or is refused, or is listed as one without
    influence.
    """
    model_type, changes = MODELS[name]
    folder = tmp_path / "folder"
    model = write_folder(folder, model_type, **changes)
    unchanged = our_logits(folder)
    fields = json.loads((folder / "config.json").read_text())
    if name.startswith("llama_"):  # a variant of a family that is tested with all fields
        fields = {
            key: value
            for key, value in fields.items()
            if key in ("rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "head_dim")
        }
    outcomes = {"refused": 0, "follows": 0, "without influence": 0}
    for change_name, change in changed_values(fields):
        changed = rewritten(folder, tmp_path / "changed", **change)
        try:
            logits = our_logits(changed)
        except UserError:
            outcomes["refused"] += 1
            continue
        except RuntimeError:  # e.g. of shapes that do not fit; transformers cannot compute it, either
            with pytest.raises(RuntimeError):
                reference_logits(changed, model)
            continue
        field = change_name.removeprefix("without ").replace(" without ", ".").partition("=")[0]
        try:
            reference = reference_logits(changed, model)
        except Exception as error:  # transformers needs it; so that nothing else may be read from the file
            assert "without" in change_name, error
            assert torch.equal(logits, unchanged), change_name
            continue
        assert max_difference(logits, reference) < 1e-5, change_name
        if torch.equal(logits, unchanged):
            assert "without" in change_name or field in NO_INFLUENCE | READ_WITHOUT_INFLUENCE, change_name
            outcomes["without influence"] += 1
        else:
            outcomes["follows"] += 1
    assert all(outcomes.values()), outcomes


@pytest.mark.slow
def test_fields_without_influence_are_known_to_change_no_logit_of_a_llama(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "folder", "llama")
    unchanged = reference_logits(tmp_path / "folder", model)
    ours = our_logits(tmp_path / "folder")
    accepted = set()
    for name in NO_INFLUENCE - UNTESTED_FIELDS:
        for value in (3, 0.25, True):
            changed = rewritten(tmp_path / "folder", tmp_path / "changed", **{name: value})
            try:
                logits = reference_logits(changed, model)
            except Exception as error:  # transformers refuses a value of this type
                print(f"{name}={value}: {error}")
                continue
            assert torch.equal(logits, unchanged) and torch.equal(our_logits(changed), ours), f"{name}={value}"
            accepted.add(name)
            break
    assert accepted == NO_INFLUENCE - UNTESTED_FIELDS


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_balance_loss_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    reference = write_folder(tmp_path, model_type, router_aux_loss_coef=0.02, output_router_logits=True, **changes)
    model = load_model(tmp_path)
    expected = reference(IDS[:1], labels=IDS[:1])
    out = model(IDS[:1, :-1], labels=IDS[:1, 1:])
    whole = model(IDS[:1])  # transformers counts the routing of the last token, too
    torch.testing.assert_close(whole.aux_loss, 0.02 * expected.aux_loss[None])
    torch.testing.assert_close(out.nll.mean() + whole.aux_loss[0], expected.loss)
    gradient = torch.autograd.grad(whole.aux_loss[0], model.model.layers[0].mlp.gate.weight)[0]
    gates = [p for key, p in reference.named_parameters() if key.endswith("layers.0.mlp.gate.weight")]
    torch.testing.assert_close(gradient, torch.autograd.grad(0.02 * expected.aux_loss, gates)[0])


def test_tensor_names_of_mixtral_are_those_of_the_decoder_after_a_round_trip() -> None:
    changes = {
        "qk_norm": False,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    model = random_model(**changes)
    state = dict(model.state_dict())
    folder_names = to_folder_names(state, "mixtral")
    assert (
        "model.layers.1.block_sparse_moe.experts.2.w3.weight" in folder_names
        and "model.layers.0.block_sparse_moe.gate.weight" in folder_names
    )
    assert to_decoder_names(folder_names, "mixtral", model.cfg).keys() == state.keys()


def test_absent_fields_of_config_json_have_the_values_of_transformers() -> None:
    for model_type, (_, own_fields) in FAMILIES.items():
        defaults = type(hf_config(model_type))().to_dict()
        for name, value in own_fields.items():
            name = name if name in defaults else "num_local_experts" if name == "num_experts" else name
            if name == "rope_theta":
                assert defaults["rope_parameters"]["rope_theta"] == value, model_type
            elif (
                name in defaults
                and name not in ("head_dim", "layer_types", "sliding_window", "no_rope_layers")
                and value is not None
            ):
                assert defaults[name] == value, (model_type, name)
