"""Folders that save_model and save_adapter write are read by transformers and PEFT, and theirs by load_model, or
refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    EXPERTS,
    LLAMA,
    TOKENIZER,
    TOP_TWO,
    YARN,
    config,
    lora_config,
    max_difference,
    random_model,
    tokens,
)
from torch import Tensor

from common.errors import UserError
from models.decoder import Decoder
from models.formats.json_files import read_config_of_weights, read_model_config
from models.formats.load import load_into, load_model, load_weights
from models.formats.save import save_adapter, save_model
from models.formats.tensor_files import check_finite
from models.lora import adapter_state_dict, add_lora, disable_adapters, merge_adapters
from runner.inference.load import weights_dir

IDS = tokens(2, 100)
LORA = lora_config(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "down_proj"])
KINDS = pytest.mark.parametrize(
    "changes", [{}, LLAMA, EXPERTS, TOP_TWO, YARN], ids=["qwen3", "llama", "moe", "moe_top_two", "yarn"]
)


def write(folder: Path, **changes: Any) -> Decoder:
    model = random_model(std=0.1, **changes)
    save_model(folder, model, model.cfg, TOKENIZER)
    return model


def adapt(model: Decoder) -> Decoder:
    add_lora(model, LORA)
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.1)
    return model


def fresh(weights: dict[str, Tensor], **changes: Any) -> Decoder:
    model = Decoder(config(**changes)).eval()
    load_into(model, weights, "init_from=DIR")
    return model


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@KINDS
def test_saved_model_has_the_same_logits_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write(tmp_path, **changes)
    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert max_difference(reference(IDS).logits, model(IDS).logits) < 1e-5
    assert reference.generation_config.eos_token_id == 2


@KINDS
def test_load_model_reads_its_own_and_transformers_folders(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write(tmp_path / "saved", **changes)
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved").save_pretrained(tmp_path / "transformers")
    # transformers writes output_router_logits=false
    without_balance = dataclasses.replace(model.cfg, router_aux_loss_coef=0.0)
    for name, expected in (("saved", model.cfg), ("transformers", without_balance)):
        opened = load_model(tmp_path / name)
        assert torch.equal(opened(IDS).logits, model(IDS).logits)
        assert dataclasses.replace(opened.cfg, name=model.cfg.name) == expected
        assert not opened.training


def test_hf_config_has_the_field_names_of_transformers_4_and_5(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    write(tmp_path / "yarn", **YARN)
    plain, yarn = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "yarn"))
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"] == 1e6
    assert plain["rope_scaling"] is None
    assert yarn["rope_scaling"]["rope_type"] == yarn["rope_parameters"]["rope_type"] == "yarn"
    assert plain["torch_dtype"] == plain["dtype"] == "float32"


def test_saved_tokenizer_is_the_same_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from data.tokenize.tokenizer import Tokenizer

    write(tmp_path)
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(TOKENIZER)
    text = "Ludo lives in Sarro. 托洛最喜欢棕色。 3.14 🙂"
    assert reference.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    assert reference.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith(
        "<|im_start|>user\nHi<|im_end|>"
    )


def test_tied_weight_is_saved_once(tmp_path: Path) -> None:
    for tie in (True, False):
        folder = tmp_path / str(tie)
        model = write(folder, tie_word_embeddings=tie)
        file = folder / "model.safetensors"
        assert ("lm_head.weight" in load_file(file)) is not tie
        parameters = 4 * sum(p.numel() for p in model.parameters())
        assert parameters < file.stat().st_size < parameters + 10_000


def test_load_model_takes_the_model_of_a_run(tmp_path: Path) -> None:
    model = write(tmp_path / "run" / "model")
    assert torch.equal(load_model(tmp_path / "run")(IDS).logits, model(IDS).logits)
    assert torch.equal(fresh(load_weights(tmp_path / "run"))(IDS).logits, model(IDS).logits)


def test_load_model_reads_sharded_weights(tmp_path: Path) -> None:
    model = write(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for part, names in enumerate((list(state)[::2], list(state)[1::2]), start=1):
        save_file({name: state[name] for name in names}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_minimind_file_is_loaded_as_fp32_with_its_tied_head(tmp_path: Path) -> None:
    model = random_model(std=0.1)
    torch.save({name: p.half() for name, p in model.state_dict().items()}, tmp_path / "full_sft_48.pth")
    weights = load_weights(tmp_path / "full_sft_48.pth")
    assert "lm_head.weight" in weights
    assert all(p.dtype == torch.float32 for p in weights.values())
    assert all(
        torch.equal(p, model.state_dict()[name].half().float()) for name, p in fresh(weights).state_dict().items()
    )


def test_pth_file_without_weights_is_refused(tmp_path: Path) -> None:
    resume, code, text = tmp_path / "resume.pth", tmp_path / "code.pth", tmp_path / "text.pth"
    torch.save({"model": {}, "step": 3}, resume)
    torch.save({"tensor": Path("object")}, code)
    text.write_text("not a file of tensors")
    for path, message in (
        (resume, "holds more than weights"),
        (code, "not a file of weights"),
        (text, "not a file of weights"),
    ):
        with pytest.raises(UserError, match=message) as error:
            load_weights(path)
        assert error.value.setting == str(path)


def test_error_of_a_pth_file_names_the_object_without_advice_to_execute_it(tmp_path: Path) -> None:
    path = tmp_path / "code.pth"
    torch.save({"tensor": Path("object")}, path)
    with pytest.raises(UserError, match=r"not a file of weights: it holds the object pathlib\.PosixPath") as error:
        load_weights(path)
    shown = "".join(traceback.format_exception(error.value))
    assert not [text for text in ("weights_only", "trust", "\x1b") if text in shown.replace("weights_only=True)", "")]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_pth_file_is_refused_whatever_torch_raises(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"weight": torch.zeros(8)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for damaged in (whole.replace(b"weight", b"\xff\xfeight"), whole[: len(whole) // 2], whole[:1], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="not a file of weights: it cannot be read as tensors"):
            load_weights(path)


def test_load_into_refuses_weights_of_another_model_by_name() -> None:
    weights = random_model().state_dict()
    with pytest.raises(UserError, match="do not fit the model") as error:
        fresh(weights, num_hidden_layers=3)
    assert "11 missing" in error.value.message
    assert "model.layers.2.self_attn.q_norm.weight" in error.value.message
    assert error.value.setting == "init_from=DIR"
    for changes, line in (
        ({"num_hidden_layers": 1}, "  11 unknown\n    model.layers.1.input_layernorm.weight (48,)"),
        ({"intermediate_size": 96}, "    model.layers.0.mlp.gate_proj.weight (80, 48), expected (96, 48)"),
        ({"qk_norm": False}, "    model.layers.0.self_attn.q_norm.weight (16,)"),
    ):
        with pytest.raises(UserError) as error:
            fresh(weights, **changes)
        assert line in error.value.message


def test_load_into_refuses_untied_weights_for_a_tied_model() -> None:
    untied, tied = random_model(tie_word_embeddings=False).state_dict(), dict(random_model().state_dict())
    with pytest.raises(UserError, match="these weights are not tied"):
        fresh(untied)
    del tied["lm_head.weight"]
    with pytest.raises(UserError) as error:
        fresh(tied, tie_word_embeddings=False)
    assert "  1 missing\n    lm_head.weight" in error.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_bias": True}, r"qwen3 \(Qwen3ForCausalLM\) with mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True, "sliding_window": 128}, "sliding_window=128"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type=dynamic"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e6, "truncate": False}},
            "truncate=False",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_theta": 1e4}, "rope_theta is given twice"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "contradict each other"),
        ({"rope_parameters": {"rope_type": "linear"}}, "missing or has another type: 'factor'"),
        (
            {"final_logit_softcapping": 30.0, "embedding_multiplier": 12.0},
            "2 fields of qwen3 .* final_logit_softcapping=30.0, embedding_multiplier=12.0",
        ),
        ({"quantization_config": {"bits": 4}}, "1 fields of qwen3 .* quantization_config"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_attention_heads": "four"}, "missing or has another type"),
    ],
)
def test_hf_config_of_another_architecture_is_refused_by_the_decoder(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    rewrite(tmp_path / "config.json", **changes)
    with pytest.raises(UserError, match=message) as error:
        read_model_config(tmp_path, "decoder")
    assert error.value.setting == str(tmp_path / "config.json")


def test_load_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config.json is missing"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="has no model"):
        load_weights(tmp_path)


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"]
)
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[: len(data) // 2], lambda data: b"{}", lambda data: b"[]", lambda data: b"\xff" * 64],
    ids=["cut", "empty", "list", "noise"],
)
def test_load_refuses_a_damaged_file_by_name(file: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    save_adapter(tmp_path / "run", adapt(write(tmp_path / "base")), LORA, str(tmp_path / "base"), TOKENIZER)
    path = tmp_path / ("run" if "adapter" in file else "base") / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as error:
        load_model(tmp_path / "run")
    assert error.value.setting == str(path)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "moe"])
def test_saved_adapter_is_loaded_unmerged_and_merged(changes: dict[str, Any], tmp_path: Path) -> None:
    base = write(tmp_path / "base" / "model", **changes)
    base_logits = base(IDS).logits
    model = adapt(base)
    save_adapter(tmp_path / "run" / "model", model, LORA, str(tmp_path / "base"), TOKENIZER)
    opened = load_model(tmp_path / "run")
    assert torch.equal(opened(IDS).logits, model(IDS).logits)
    with disable_adapters(opened):
        assert torch.equal(opened(IDS).logits, base_logits)
    random_state = torch.get_rng_state()
    weights = load_weights(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), random_state), "a run that starts from an adapter draws other numbers"
    assert max_difference(fresh(weights, **changes)(IDS).logits, model(IDS).logits) < 1e-5


def test_saved_adapter_has_the_same_logits_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = adapt(write(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", model, LORA, str(tmp_path / "base"), TOKENIZER)
    reference = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert max_difference(reference(IDS).logits, model(IDS).logits) < 1e-5
    reference.save_pretrained(tmp_path / "peft")
    assert torch.equal(load_model(tmp_path / "peft")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("base", ["scratch", "file", "adapter"])
def test_adapter_folder_holds_a_base_that_peft_cannot_open(base: str, tmp_path: Path) -> None:
    model = random_model(std=0.1)
    sources = {"scratch": "scratch", "file": str(tmp_path / "weights.pth"), "adapter": str(tmp_path / "first")}
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    save_adapter(tmp_path / "first", adapt(random_model(std=0.1)), LORA, "scratch", TOKENIZER)
    adapt(model)
    save_adapter(tmp_path / "run" / ".model-new", model, LORA, sources[base], TOKENIZER)
    (tmp_path / "run" / ".model-new").rename(tmp_path / "run" / "model")
    (tmp_path / "weights.pth").unlink()
    assert torch.equal(load_model(tmp_path / "run")(IDS).logits, model(IDS).logits)


def test_adapter_of_an_adapter_is_added_to_it(tmp_path: Path) -> None:
    first = adapt(random_model(std=0.1))
    save_adapter(tmp_path / "first", first, LORA, "scratch", TOKENIZER)
    merge_adapters(first)
    second = adapt(fresh({name: p for name, p in first.state_dict().items() if ".lora." not in name}))
    save_adapter(tmp_path / "second", second, LORA, "scratch", TOKENIZER)
    rewrite(tmp_path / "second" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "first"))
    assert max_difference(load_model(tmp_path / "second")(IDS).logits, second(IDS).logits) < 1e-5


def test_merged_model_is_saved_without_adapters(tmp_path: Path) -> None:
    model = adapt(random_model(std=0.1))
    merge_adapters(model)
    save_model(tmp_path, model, model.cfg, TOKENIZER)
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_adapter_of_another_kind_or_base_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", adapt(write(tmp_path / "base")), LORA, str(tmp_path / "base"), TOKENIZER)
    settings = tmp_path / "adapter" / "adapter_config.json"
    rewrite(settings, use_dora=True)
    with pytest.raises(UserError, match="has the matrices A, B, expected A, B, magnitude with use_dora=True"):
        load_model(tmp_path / "adapter")
    rewrite(settings, use_dora=False)
    write(tmp_path / "wide", intermediate_size=96)
    rewrite(settings, base_model_name_or_path=str(tmp_path / "wide"))
    for load in (load_model, load_weights):
        with pytest.raises(UserError, match="does not fit its base model") as error:
            load(tmp_path / "adapter")
        assert "correct base_model_name_or_path" in error.value.fix
    for name in (str(tmp_path / "missing"), "a" * 5000):
        rewrite(settings, base_model_name_or_path=name)
        for load in (load_model, load_weights):
            with pytest.raises(UserError, match="base model does not exist"):
                load(tmp_path / "adapter")


def test_adapter_that_is_its_own_base_is_refused_with_the_field_to_correct(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    save_adapter(adapter, adapt(write(tmp_path / "base")), LORA, str(tmp_path / "base"), TOKENIZER)
    shutil.copytree(adapter, tmp_path / "other")
    for base, other, corrected in ((".", "", adapter), (adapter, "", adapter), (tmp_path / "other", adapter, "other")):
        rewrite(adapter / "adapter_config.json", base_model_name_or_path=str(base))
        rewrite(tmp_path / "other" / "adapter_config.json", base_model_name_or_path=str(other))
        for load in (load_model, load_weights):
            with pytest.raises(UserError, match="the adapter is its own base model") as caught:
                load(adapter)
            assert caught.value.fix.endswith(f"{tmp_path / corrected / 'adapter_config.json'}")


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("model-q4.gguf", "a GGUF file", "choose the folder of the original weights"),
        (
            "lit_model.pth",
            "a checkpoint of litgpt",
            "litgpt convert_from_litgpt 'my models/one' NEW && mv NEW/model.pth",
        ),
        ("model_000650.pt", "a checkpoint of nanochat", "--input_dir 'my models/one' --output_dir NEW"),
    ],
)
def test_model_of_another_tool_is_named_with_its_conversion(
    name: str, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my models/one")
    folder.mkdir(parents=True)
    (folder / "other.pth").write_bytes(b"x")
    for source, message in ((folder, "config.json is missing"), (folder / "other.pth", "not a file of weights")):
        with pytest.raises(UserError, match=message):
            read_config_of_weights(source)
    (folder / name).write_bytes(b"GGUF")
    for read, source in (
        (load_model, folder),
        (read_config_of_weights, folder),
        (read_config_of_weights, folder / name),
        (weights_dir, folder / name),
    ):
        with pytest.raises(UserError, match=f"this is {what}, no Hugging Face folder") as refused:
            read(source)
        assert fix in refused.value.fix
    with pytest.raises(UserError, match="not a file of weights"):
        read_config_of_weights(folder / "other.pth")


@pytest.mark.parametrize("stored_class", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_saved_tokenizer_names_a_class_that_transformers_4_has(stored_class: str, tmp_path: Path) -> None:
    """Folders that transformers 5 has written gave it to `model/` of runs, and to adapters."""
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    config_file = tmp_path / "tokenizer" / "tokenizer_config.json"
    rewrite(config_file, tokenizer_class=stored_class, extra_special_tokens=["<|im_start|>"])
    model = random_model()
    save_model(tmp_path / "model", model, model.cfg, tmp_path / "tokenizer")
    save_adapter(tmp_path / "adapter", adapt(model), LORA, "scratch", tmp_path / "tokenizer")
    for folder in (tmp_path / "model", tmp_path / "adapter", tmp_path / "adapter" / "base"):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        if stored_class == "PreTrainedTokenizerFast":  # as it is
            assert config == json.loads(config_file.read_text())
        else:
            assert config["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in config


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_pointer_of_git_lfs_is_named_with_the_command_that_replaces_it(file: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(UserError, match="a pointer of Git LFS") as refused:
        load_model(tmp_path)
    assert refused.value.fix == f"git -C {tmp_path} lfs pull"


def test_model_folder_of_the_hub_cache_loads_but_no_link_to_the_outside(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0", tmp_path / "models--a--b" / "blobs"
    model = write(snapshot)
    blobs.mkdir()
    for file in [*snapshot.iterdir()]:
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert max_difference(load_model(snapshot)(IDS).logits, model(IDS).logits) == 0
    save_model(tmp_path / "export", model, model.cfg, snapshot)
    assert not any(path.is_symlink() for path in (tmp_path / "export").iterdir())
    for name in ("config.json", "model.safetensors"):
        outside = (blobs / name).rename(tmp_path / name)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(outside)
        with pytest.raises(UserError, match="this is a link"):
            load_model(snapshot)
        (snapshot / name).unlink()
        os.link(outside, snapshot / name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "export")
    with pytest.raises(UserError, match="this is a link"):
        load_weights(tmp_path / "run")


def test_export_copies_no_tokenizer_file_through_a_link(tmp_path: Path) -> None:
    import shutil

    model, source = random_model(std=0.1), shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    (tmp_path / "secret.key").write_text("{}")
    (source / "added_tokens.json").symlink_to(tmp_path / "secret.key")
    with pytest.raises(UserError, match="this is a link"):
        save_model(tmp_path / "export", model, model.cfg, source)
    assert not (tmp_path / "export" / "added_tokens.json").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_model_file_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="neither a regular file"):
        load_weights(tmp_path)


def test_files_of_a_model_folder_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            folder = tmp_path / str(mask)
            save_model(folder / "model", random_model(), config(), TOKENIZER)
            save_adapter(folder / "adapter", adapt(random_model()), LORA, "scratch", TOKENIZER)
        finally:
            os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in folder.rglob("*") if file.is_file()} == {mode}


def test_saved_model_stops_at_every_token_that_ends_an_answer(tmp_path: Path) -> None:
    from data.tokenize.tokenizer import Tokenizer

    model = random_model()
    eos_id = Tokenizer.load(TOKENIZER).eos_id
    for stop_ids in ((eos_id,), (eos_id, 7)):
        folder = tmp_path / str(len(stop_ids))
        save_model(folder, model, model.cfg, TOKENIZER, stop_ids)
        assert set(Tokenizer.load(folder).stop_ids) == set(stop_ids)


def test_infinite_number_is_a_limit_only_by_its_name() -> None:
    """Before: an infinite weight of one value passed as a limit of Gemma 4's clipped layers."""
    infinite = torch.tensor(torch.inf)
    check_finite({"layer.input_min": -infinite, "layer.output_max": infinite}, "model")
    for name, value in {"scale": infinite, "output_max": torch.tensor(torch.nan), "x_max": infinite.expand(2)}.items():
        with pytest.raises(UserError, match=f"{name} has values that are not finite"):
            check_finite({name: value}, "model")
