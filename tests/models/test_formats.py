"""What we write, others read; what others wrote, we read or refuse by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import BEST_TWO, EXPERTS, LLAMA, TOKENIZER, YARN, apart, config, random_model, tokens
from torch import Tensor

from models.config import LoraConfig
from models.decoder import Decoder
from models.formats.load import load_into, load_model, load_weights
from models.formats.save import save_adapter, save_model
from models.lora import adapter_state_dict, add_lora, disable_adapters, merge_adapters

IDS = tokens(2, 100)
LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.0, targets=["q_proj", "down_proj"])
KINDS = pytest.mark.parametrize("changes", [{}, LLAMA, EXPERTS, BEST_TWO, YARN], ids=["qwen3", "llama", "moe", "moe_best_two", "yarn"])


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
    load_into(model, weights, "init_from=there")
    return model


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@KINDS
def test_transformers_opens_our_folder_and_says_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write(tmp_path, **changes)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert apart(theirs(IDS).logits, model(IDS).logits) < 1e-5
    assert theirs.generation_config.eos_token_id == 2


@KINDS
def test_we_open_what_transformers_writes_and_what_we_wrote(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write(tmp_path / "ours", **changes)
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    for name in ("ours", "theirs"):
        opened = load_model(tmp_path / name)
        assert torch.equal(opened(IDS).logits, model(IDS).logits)
        # how experts are chosen is not asked where there are none
        assert dataclasses.replace(opened.cfg, name=model.cfg.name) == model.cfg
        assert not opened.training


def test_transformers_4_finds_the_rotary_base_and_the_type_under_its_names(tmp_path: Path) -> None:
    write(tmp_path / "plain")
    write(tmp_path / "yarn", **YARN)
    plain, yarn = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "yarn"))
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"] == 1e6
    assert plain["rope_scaling"] is None
    assert yarn["rope_scaling"]["rope_type"] == yarn["rope_parameters"]["rope_type"] == "yarn"
    assert plain["torch_dtype"] == plain["dtype"] == "float32"


def test_transformers_opens_the_tokenizer_beside_the_model(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from data.tokenize.tokenizer import Tokenizer

    write(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(TOKENIZER)
    text = "Ludo lives in Sarro. 托洛最喜欢棕色。 3.14 🙂"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False).startswith("<|im_start|>user\nHi<|im_end|>")


def test_a_tied_tensor_is_written_once(tmp_path: Path) -> None:
    for tie in (True, False):
        folder = tmp_path / str(tie)
        model = write(folder, tie_word_embeddings=tie)
        file = folder / "model.safetensors"
        assert ("lm_head.weight" in load_file(file)) is not tie
        parameters = 4 * sum(p.numel() for p in model.parameters())
        assert parameters < file.stat().st_size < parameters + 10_000


def test_a_run_is_opened_by_its_folder(tmp_path: Path) -> None:
    model = write(tmp_path / "run" / "model")
    assert torch.equal(load_model(tmp_path / "run")(IDS).logits, model(IDS).logits)
    assert torch.equal(fresh(load_weights(tmp_path / "run"))(IDS).logits, model(IDS).logits)


def test_weights_in_several_files_are_gathered(tmp_path: Path) -> None:
    model = write(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for part, names in enumerate((list(whole)[::2], list(whole)[1::2]), start=1):
        save_file({name: whole[name] for name in names}, tmp_path / f"model-0000{part}-of-00002.safetensors")
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_a_minimind_file_is_read_in_half_precision_with_its_doubled_head(tmp_path: Path) -> None:
    model = random_model(std=0.1)
    torch.save({name: p.half() for name, p in model.state_dict().items()}, tmp_path / "full_sft_48.pth")
    weights = load_weights(tmp_path / "full_sft_48.pth")
    assert "lm_head.weight" in weights
    assert all(p.dtype == torch.float32 for p in weights.values())
    assert all(torch.equal(p, model.state_dict()[name].half().float()) for name, p in fresh(weights).state_dict().items())


def test_a_file_that_is_no_weights_is_refused(tmp_path: Path) -> None:
    resume, code, text = tmp_path / "resume.pth", tmp_path / "code.pth", tmp_path / "text.pth"
    torch.save({"model": {}, "step": 3}, resume)
    torch.save({"tensor": Path("object")}, code)
    text.write_text("not a file of tensors")
    for path, what in ((resume, "holds more than weights"), (code, "no file of weights"), (text, "no file of weights")):
        with pytest.raises(ValueError, match=what) as refusal:
            load_weights(path)
        assert refusal.value.args[1] == str(path)


def test_weights_of_another_model_are_refused_by_name() -> None:
    weights = random_model().state_dict()
    with pytest.raises(ValueError, match="not those of this model") as refusal:
        fresh(weights, num_hidden_layers=3)
    assert "11 missing" in refusal.value.args[0]
    assert "model.layers.2.self_attn.q_norm.weight" in refusal.value.args[0]
    assert refusal.value.args[1] == "init_from=there"
    for changes, line in (
        ({"num_hidden_layers": 1}, "  11 not of this model\n    model.layers.1.input_layernorm.weight (48,)"),
        ({"intermediate_size": 96}, "    model.layers.0.mlp.gate_proj.weight (80, 48), not (96, 48)"),
        ({"qk_norm": False}, "    model.layers.0.self_attn.q_norm.weight (16,)"),
    ):
        with pytest.raises(ValueError) as refusal:
            fresh(weights, **changes)
        assert line in refusal.value.args[0]


def test_a_head_of_its_own_is_never_lost() -> None:
    untied, tied = random_model(tie_word_embeddings=False).state_dict(), dict(random_model().state_dict())
    with pytest.raises(ValueError, match="these weights are not tied"):
        fresh(untied)
    del tied["lm_head.weight"]
    with pytest.raises(ValueError) as refusal:
        fresh(tied, tie_word_embeddings=False)
    assert "  1 missing\n    lm_head.weight" in refusal.value.args[0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "gpt2"}, "type gpt2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "type llama3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary positions"),
    ],
)
def test_a_model_that_ours_is_not_is_refused(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    write(tmp_path)
    rewrite(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=what) as refusal:
        load_model(tmp_path)
    assert refusal.value.args[1] == str(tmp_path / "config.json")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no model here"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="there are no weights here"):
        load_weights(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[: len(whole) // 2], lambda whole: b"{}", lambda whole: b"[]", lambda whole: b"\xff" * 64],
    ids=["cut", "empty", "list", "noise"],
)
def test_a_damaged_folder_is_refused_by_the_name_of_its_file(file: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    save_adapter(tmp_path / "run", adapt(write(tmp_path / "base")), LORA, str(tmp_path / "base"), TOKENIZER)
    path = tmp_path / ("run" if "adapter" in file else "base") / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError) as refusal:
        load_model(tmp_path / "run")
    what, where, fix = refusal.value.args
    assert where == str(path)


@pytest.mark.parametrize("changes", [{}, EXPERTS], ids=["dense", "moe"])
def test_an_adapter_comes_back_beside_its_base_and_merged_into_it(changes: dict[str, Any], tmp_path: Path) -> None:
    base = write(tmp_path / "base" / "model", **changes)
    bare = base(IDS).logits
    model = adapt(base)
    save_adapter(tmp_path / "run" / "model", model, LORA, str(tmp_path / "base"), TOKENIZER)
    opened = load_model(tmp_path / "run")
    assert torch.equal(opened(IDS).logits, model(IDS).logits)
    with disable_adapters(opened):
        assert torch.equal(opened(IDS).logits, bare)
    assert apart(fresh(load_weights(tmp_path / "run"), **changes)(IDS).logits, model(IDS).logits) < 1e-5


def test_peft_opens_our_adapter_and_says_the_same(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = adapt(write(tmp_path / "base"))
    save_adapter(tmp_path / "adapter", model, LORA, str(tmp_path / "base"), TOKENIZER)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert apart(theirs(IDS).logits, model(IDS).logits) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    assert torch.equal(load_model(tmp_path / "theirs")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("base", ["scratch", "file", "adapter"])
def test_a_base_that_peft_could_not_open_lies_in_the_adapters_folder(base: str, tmp_path: Path) -> None:
    model = random_model(std=0.1)
    sources = {"scratch": "scratch", "file": str(tmp_path / "weights.pth"), "adapter": str(tmp_path / "first")}
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    save_adapter(tmp_path / "first", adapt(random_model(std=0.1)), LORA, "scratch", TOKENIZER)
    adapt(model)
    save_adapter(tmp_path / "run" / ".model-new", model, LORA, sources[base], TOKENIZER)
    (tmp_path / "run" / ".model-new").rename(tmp_path / "run" / "model")
    (tmp_path / "weights.pth").unlink()
    assert torch.equal(load_model(tmp_path / "run")(IDS).logits, model(IDS).logits)


def test_a_merged_model_is_saved_without_its_adapters(tmp_path: Path) -> None:
    model = adapt(random_model(std=0.1))
    merge_adapters(model)
    save_model(tmp_path, model, model.cfg, TOKENIZER)
    assert torch.equal(load_model(tmp_path)(IDS).logits, model(IDS).logits)


def test_an_adapter_without_its_base_or_of_a_kind_we_lack_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "adapter", adapt(write(tmp_path / "base")), LORA, str(tmp_path / "base"), TOKENIZER)
    settings = tmp_path / "adapter" / "adapter_config.json"
    rewrite(settings, use_dora=True)
    with pytest.raises(ValueError, match="use_dora=True"):
        load_model(tmp_path / "adapter")
    rewrite(settings, use_dora=False)
    write(tmp_path / "wide", intermediate_size=96)
    rewrite(settings, base_model_name_or_path=str(tmp_path / "wide"))
    for load in (load_model, load_weights):
        with pytest.raises(ValueError, match="not made for its base"):
            load(tmp_path / "adapter")
    rewrite(settings, base_model_name_or_path=str(tmp_path / "nowhere"))
    for load in (load_model, load_weights):
        with pytest.raises(ValueError, match="under this adapter is gone"):
            load(tmp_path / "adapter")
