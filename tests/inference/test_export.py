"""export.py: each format is read again with the model's numbers; what cannot be written is refused and leaves nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from command_fixtures import TINY_MODEL, TINY_RUN, Call
from tiny_models import lora_config
from transformers_families import write_family

from common.errors import UserError
from data.tokenize.jinja_sandbox import compile_template, unmask_control_tokens
from data.tokenize.origin import SAMPLE_TOKENIZER
from data.tokenize.tokenizer import Tokenizer
from models.families.decoder import RopeScaling
from models.formats.json_files import write_json_file
from models.formats.load import load_model
from models.formats.save import generation_settings, save_adapter
from models.generate import generate
from models.lora import add_lora
from runner.inference.export import verify
from runner.inference.export.command import export, model_card
from runner.inference.export.formats import ExportSettings
from runner.inference.export.gguf_file import check_converted
from runner.inference.export.gguf_tokenizer import template_of_llama_cpp
from runner.inference.export.hf_compatibility import make_readable_by_transformers_4
from runner.inference.load import load_trained

ROUNDING_OF_LLAMA_CPP = 0.05  # of a log-probability
SAMPLES = Path(__file__).parents[2] / "data" / "samples"
IDS = torch.arange(3, 30)[None]


def export_config(run: Path, to: Path, **changes: object) -> ExportSettings:
    values: dict = {"run": str(run), "to": str(to), "format": "hf", "dtype": "auto", "max_shard_size": "5GB"}
    values |= {"license": None, "base_model": None, "converter": None, "verify": True}
    return ExportSettings(**values | changes)


def run_export(run: Path, to: Path, **changes: object) -> None:
    export(export_config(run, to, **changes), run)


@pytest.fixture
def adapter(hf_folder: Path, tmp_path: Path) -> Path:
    """Folder of an adapter that changes the model."""
    model, cfg = load_model(hf_folder), lora_config(4, 8.0, 0.0, ["q_proj", "down_proj"])
    torch.manual_seed(0)
    add_lora(model, cfg)
    for name, parameter in model.named_parameters():
        if name.endswith(".B"):
            parameter.data.normal_(std=0.5)
    save_adapter(tmp_path / "adapter", model, cfg, str(hf_folder), load_trained(hf_folder, "cpu").tokenizer.folder)
    return tmp_path / "adapter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exported_folder_is_compared_and_has_the_dtype(
    hf_folder: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export(hf_folder, tmp_path / "to", dtype=dtype, license="apache-2.0", max_shard_size="100KB")
    out = capsys.readouterr().out
    assert f"read by transformers {version('transformers')}: largest difference" in out and "the same token ids" in out
    assert json.loads((tmp_path / "to" / "config.json").read_text())["torch_dtype"] == dtype
    assert len(list((tmp_path / "to").glob("model-*.safetensors"))) > 1
    card = (tmp_path / "to" / "README.md").read_text()
    assert "license: apache-2.0" in card and str(tmp_path) not in card
    expected = load_model(hf_folder)
    for parameter in expected.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    assert torch.equal(load_model(tmp_path / "to")(IDS).logits, expected(IDS).logits)


@pytest.mark.slow
def test_export_in_16_bits_rounds_buffers(tmp_path: Path) -> None:
    per_layer = {"vocab_size_per_layer_input": 6400, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
    write_family(tmp_path / "base", "gemma4_text", **per_layer, num_kv_shared_layers=0)
    run_export(tmp_path / "base", tmp_path / "new", dtype="bfloat16")
    written = load_model(tmp_path / "new").get_buffer("model.layers.0.layer_scalar")
    assert torch.equal(written, load_model(tmp_path / "base").get_buffer("model.layers.0.layer_scalar").bfloat16())


@pytest.mark.slow
def test_exported_tokenizer_has_no_dropout(hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AutoTokenizer reads the ids that were trained: dropout is off in training."""
    own = shutil.copytree(hf_folder, tmp_path / "own")
    stored = json.loads((own / "tokenizer.json").read_text())
    (own / "tokenizer.json").write_text(json.dumps(stored | {"model": stored["model"] | {"dropout": 0.5}}))
    run_export(own, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "tokenizer.json").read_text()) == stored | {
        "model": stored["model"] | {"dropout": None}
    }
    assert (
        capsys.readouterr().err.count(
            "has dropout 0.5, which splits a text in another way each time: it is switched off"
        )
        == 1
    )


@pytest.mark.slow
def test_exported_adapter_is_merged_or_kept(adapter: Path, tmp_path: Path) -> None:
    expected = load_model(adapter)(IDS).logits
    run_export(adapter, tmp_path / "merged", format="merged")
    assert (load_model(tmp_path / "merged")(IDS).logits - expected).abs().max() < 1e-4
    run_export(adapter, tmp_path / "peft", format="peft")
    assert torch.equal(load_model(tmp_path / "peft")(IDS).logits, expected)


def test_exported_minimind_file_is_read_again(
    hf_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_export(hf_folder, tmp_path / "to", format="minimind")
    assert "to: minimind, float16" in capsys.readouterr().out
    assert "| dtype | float16 |" in (tmp_path / "to" / "README.md").read_text()
    state = torch.load(tmp_path / "to" / "model.pth", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    loaded = load_trained(tmp_path / "to" / "model.pth", "cpu")  # as run= of chat.py, and the reference of a DPO run
    assert (loaded.model(IDS).logits - load_model(hf_folder)(IDS).logits).abs().max() < 1e-2
    assert loaded.run_dir == tmp_path / "to"  # has evaluations.jsonl
    alone = tmp_path / "alone" / "model.pth"
    alone.parent.mkdir()
    shutil.copy(tmp_path / "to" / "model.pth", alone)
    with pytest.raises(UserError, match="tokenizer.json") as without_tokenizer:
        load_trained(alone, "cpu")
    assert "Not a directory" not in str(without_tokenizer.value)
    with pytest.raises(UserError, match="no settings of its model"):
        load_trained(hf_folder / "model.safetensors", "cpu")


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"rope_theta": 1e4, "rms_norm_eps": 1e-5}, "rope_theta, rms_norm_eps"),
        ({"qk_norm": False, "rms_norm_eps": 1e-5}, "num_attention_heads"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"num_experts": 2}, "num_experts_per_tok"),
        ({"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_minimind_export_of_another_shape_is_refused(
    write_model: Callable[..., Path], tmp_path: Path, changes: dict, differing: str
) -> None:
    model = write_model(tmp_path / "odd", 0, **changes)
    with pytest.raises(UserError, match=f"its {differing} differ"):
        run_export(model, tmp_path / "to", format="minimind", verify=False)


@pytest.mark.slow
def test_exported_gguf_file_has_the_weights_and_the_tokenizer(hf_folder: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    run_export(hf_folder, tmp_path / "to", format="gguf", dtype="q8_0")
    assert 'PARAMETER stop "<|im_end|>"' in (tmp_path / "to" / "Modelfile").read_text()
    fields = GGUFReader(tmp_path / "to" / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 6400
    assert "generation %}" not in fields["tokenizer.chat_template"].contents()


@pytest.mark.parametrize("tags", ["{% TAG %}\n", "{%- TAG -%}\n  ", "  {%+ TAG +%}", "{%TAG%}"])
def test_gguf_template_writes_what_the_one_with_marks_writes(tags: str) -> None:
    """White space around the marks is that of their tags; of named templates the default one is written."""
    begin, end = (tags.replace("TAG", name) for name in ("generation", "endgeneration"))
    template = f"{{% for each in messages %}}\n<a>\n{begin}{{{{ each }}}} \n{end}<b>\n{{% endfor %}}\n"
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": template}]
    tokenizer = replace(Tokenizer.load(SAMPLE_TOKENIZER), chat_template=cast("Any", named))
    written = template_of_llama_cpp(tokenizer)
    assert "generation" not in written
    expected, found = (compile_template(each)(messages=["x", "y"]) for each in (template, written))
    assert found == unmask_control_tokens(expected)


def test_export_that_differs_is_refused_and_leaves_nothing(
    hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.inference.export.verify.MAX_DIFFERENCE", -1.0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="differs from the trained model"):
        run_export(hf_folder, tmp_path / "to")
    assert sorted(tmp_path.iterdir()) == before


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


@pytest.mark.slow
def test_export_keeps_how_the_model_is_sampled(own_folder: Path, tmp_path: Path) -> None:
    """Ids of tokens are those of the tokenizer; an adapter and the model that it is merged to have the settings of the
    base model.
    """
    from transformers import GenerationConfig

    stored = SAMPLING | {
        "eos_token_id": [2, 0],
        "pad_token_id": 77,
        "transformers_version": "4.0",
        "suppress_tokens": [5, 6],
    }
    (own_folder / "generation_config.json").write_text(json.dumps(stored))
    loaded = load_trained(own_folder, "cpu")
    run_export(own_folder, tmp_path / "hf", verify=False)
    add_lora(loaded.model, cfg := lora_config(4, 8.0, 0.0, ["q_proj"]))
    save_adapter(tmp_path / "adapter", loaded.model, cfg, str(own_folder), own_folder)
    (tmp_path / "adapter" / "generation_config.json").unlink()  # an adapter of PEFT has none
    run_export(tmp_path / "adapter", tmp_path / "merged", format="merged", verify=False)
    run_export(tmp_path / "adapter", tmp_path / "peft", format="peft", verify=False)
    for name in ("hf", "merged", "peft"):
        written = GenerationConfig.from_pretrained(tmp_path / name)
        assert {key: getattr(written, key) for key in SAMPLING} == SAMPLING and written.suppress_tokens == [5, 6]
        assert written.pad_token_id == 0
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [0, 2]


def test_generation_config_has_only_what_transformers_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GenerationConfig

    # `save_pretrained` refuses these, `from_pretrained` does not
    greedy = {"temperature": 0.6, "top_p": 0.9, "do_sample": False}
    refused = {
        "max_new_tokens": -1,
        "early_stopping": [1],
        "cache_implementation": "../code.py",
        "num_return_sequences": "x",
    }
    unknown = {
        "auto_map": {"a": "code.py"},
        "custom_generate": "me/code",
        "validate": 1,
        "suppress_tokens": [[[1]]],
        "watermarking_config": {"x": 1},
    }
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(greedy | refused | unknown | {"eos_token_id": 5, "_from_model_config": True}))
    assert generation_settings(path) == greedy
    note = capsys.readouterr().err
    assert (
        all(name in note for name in (*refused, *unknown))
        and "eos" not in note
        and GenerationConfig(**greedy).top_p == 0.9
    )
    path.write_text(json.dumps({"eos_token_id": 5}))
    assert generation_settings(path) == {}
    path.write_text('{"top_k": ' + "[" * 200 + "]" * 200 + "}")
    with pytest.raises(UserError, match="nested deeper"):
        generation_settings(path)
    path.unlink()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="this is a link"):
        generation_settings(path)


@pytest.fixture
def own_folder(hf_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folder, tmp_path / "own"))


@pytest.mark.parametrize("name", [[1], "T5Tokenizer"], ids=["list", "another class"])
def test_export_refuses_a_tokenizer_class_that_cannot_read_it(own_folder: Path, name: object) -> None:
    path = own_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))
    with pytest.raises(UserError, match="transformers cannot read the tokenizer: "):
        verify.compare_tokenizer(own_folder, load_trained(own_folder, "cpu").tokenizer)


def test_export_detects_other_token_ids(own_folder: Path) -> None:
    tokenizer = load_trained(own_folder, "cpu").tokenizer
    verify.compare_tokenizer(own_folder, tokenizer)
    stored = json.loads((own_folder / "tokenizer.json").read_text())
    # digits are no tokens of their own
    stored["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (own_folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="other token ids"):
        verify.compare_tokenizer(own_folder, tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "merged"}, "trained no adapter"),
        ({"format": "peft"}, "trained no adapter"),
        ({"to": "."}, "the folder to write exists"),
        ({"to": "missing/folder"}, "is no folder"),
    ],
)
def test_export_that_cannot_be_written_is_refused(hf_folder: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_export(hf_folder, **{"to": Path("new"), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "q8_0"}, "dtype must be one of float32, bfloat16, float16"),
        ({"format": "minimind", "dtype": "bf16"}, "dtype must be one of float16, got bfloat16"),
        ({"format": "minimind", "dtype": "fp32"}, "dtype must be one of float16, got float32"),
        ({"format": "onnx"}, "format must be one of gguf, hf, merged, minimind, peft"),
        ({"max_shard_size": "big"}, "max_shard_size must be a number above 0 with"),
        ({"converter": "convert.py"}, "converter is read by format=gguf only"),
    ],
)
def test_export_settings_are_checked(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export_config(tmp_path, tmp_path / "to", **changes)


@pytest.mark.parametrize("steps", [[{"type": "Punctuation", "behavior": "Isolated"}], []])
def test_gguf_of_an_unknown_tokenizer_is_refused(own_folder: Path, tmp_path: Path, steps: list) -> None:
    stored = json.loads((own_folder / "tokenizer.json").read_text())
    stored["pre_tokenizer"]["pretokenizers"] = steps and steps + stored["pre_tokenizer"]["pretokenizers"]
    (own_folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="no name for how this tokenizer splits texts"):
        run_export(own_folder, tmp_path / "to", format="gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": RopeScaling(4.0, 32, type="llama3")}, "no model.rope_scaling.type=llama3 for a qwen3"),
        (
            {"rope_scaling": RopeScaling(4.0, 32, beta_fast=16.0)},
            "beta_fast and beta_slow of YaRN from its command line",
        ),
        ({"num_experts": 2, "norm_topk_prob": False}, "always normalizes the routing weights"),
        ({"attention_bias": True, "attention_out_bias": True}, "with these biases"),
        ({"max_position_embeddings": 2**32, "rope_theta": 1e39}, "cannot hold a number of this model"),
    ],
)
def test_gguf_of_a_model_that_llama_cpp_computes_otherwise_is_refused(
    write_model: Callable[..., Path], tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_export(write_model(tmp_path / "model", seed=0, **changes), tmp_path / "to", format="gguf")


def test_export_into_a_run_or_over_a_link_is_refused(hf_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "into").symlink_to(hf_folder)
    for to, message in {"run/model": "inside of a run", "into/new": "inside of a run", "link": "exists"}.items():
        with pytest.raises(UserError, match=message):
            run_export(hf_folder, tmp_path / to)


def test_model_card_quotes_texts_of_a_run_but_no_folder_of_this_machine(own_folder: Path, tmp_path: Path) -> None:
    hostile = "x`|<img src=//e.example>\n\n# Title\n---\nlicense: mit\x1b[2J"
    run = {
        "stage": hostile,
        "data": [{"file": f"/home/me/{hostile}", "kept": hostile, "tokens": 5}],
        "metrics": {"val_loss": "x", "loss": 2.5},
        "step": 7,
    }
    source = load_trained(own_folder, "cpu")
    (own_folder / ".hydra").mkdir()
    (own_folder / ".hydra" / "overrides.yaml").write_text(
        json.dumps(["data.path=[/home/me/a.jsonl,/home/me/b.jsonl]", hostile])
    )
    card = model_card(export_config(own_folder, tmp_path / "to"), source, run, own_folder, "my_model\n# x")
    assert [line for line in card.splitlines() if line.startswith("# ")] == ["# my_model-- x"]
    assert "/home/me" not in card and "data.path=[a.jsonl,b.jsonl]" in card and "\x1b" not in card
    assert yaml.safe_load(card.split("---\n")[1]) == {"pipeline_tag": "text-generation", "library_name": "transformers"}
    assert all(line.count("|") == 3 for line in card.splitlines() if line.startswith("|")) and "| steps | 7 |" in card


def card_of(source: Path, run: dict, to: Path, format: str = "hf", dtype: str = "float32") -> tuple[dict, str]:
    """Return the metadata and the text of the model card."""
    cfg = export_config(source, to, format=format, dtype=dtype)
    card = model_card(cfg, load_trained(source, "cpu"), run, to, "x")
    return yaml.safe_load(card.split("---\n")[1]), card


def test_model_card_leaves_out_what_is_not_known(own_folder: Path, tmp_path: Path) -> None:
    run = {
        "export": {"weights": "last", "step": 7, "loss": None},
        "metrics": {"loss": 2.5, "val_loss": None},
        "data": [{"file": "a.jsonl", "kept": None}],
    }
    _, card = card_of(own_folder, run, tmp_path / "card")
    assert (
        "| weights | `last, step 7` |" in card
        and "| losses | `training 2.5` |" in card
        and "| data | `a.jsonl` |" in card
        and "None" not in card
    )


def test_model_card_counts_the_adapter_apart(adapter: Path, hf_folder: Path, tmp_path: Path) -> None:
    base = sum(parameter.numel() for parameter in load_model(hf_folder).parameters())
    whole = sum(parameter.numel() for parameter in load_model(adapter).parameters())
    _, card = card_of(adapter, {}, tmp_path / "card", "merged")
    assert f" {base:,} parameters |" in card and f"| adapter | {whole - base:,} parameters, merged |" in card


def test_model_card_names_the_base_model_of_a_chain_of_runs(own_folder: Path, tmp_path: Path) -> None:
    """dpo started from sft, which started from a local folder that transformers loaded from the hub."""
    config = json.loads((own_folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "Qwen/Qwen3-0.6B"}))
    (tmp_path / "sft" / "model").mkdir(parents=True)
    (tmp_path / "sft" / "run.json").write_text(json.dumps({"status": "completed", "init_from": str(own_folder)}))
    for start in (tmp_path / "sft", tmp_path / "sft" / "model"):
        header, card = card_of(own_folder, {"init_from": str(start)}, tmp_path / "card")
        assert (header["base_model"], header["base_model_relation"]) == ("Qwen/Qwen3-0.6B", "finetune")
        assert (
            f"| started from | `sft from {own_folder.name} from Qwen/Qwen3-0.6B` |" in card
            and str(tmp_path) not in card
        )
    (own_folder / "config.json").write_text(json.dumps(config | {"_name_or_path": str(tmp_path)}))
    header, card = card_of(own_folder, {"init_from": str(tmp_path / "sft")}, tmp_path / "card")
    assert "base_model" not in header and f"`sft from {own_folder.name}`" in card


@pytest.mark.parametrize(
    ("dtype", "run", "relation"),
    [("float32", {"stage": "sft"}, "finetune"), ("float32", {}, None), ("q8_0", {"stage": "sft"}, "quantized")],
)
def test_model_card_calls_only_quantized_files_quantized(
    own_folder: Path, tmp_path: Path, dtype: str, run: dict, relation: str | None
) -> None:
    config = json.loads((own_folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "me/base"}))
    header, _ = card_of(
        own_folder, run | ({"init_from": str(own_folder)} if run else {}), tmp_path / "card", "gguf", dtype
    )
    assert header["base_model"] == "me/base" and header.get("base_model_relation") == relation


def test_rotary_settings_are_written_for_transformers_4(tmp_path: Path) -> None:
    layers = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    plain = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    for model_type, rope, expected in (
        ("stablelm", plain, {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None}),
        (
            "gemma3_text",
            layers,
            {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ):
        write_json_file(
            tmp_path / "config.json",
            {"model_type": model_type, "rope_parameters": rope, "auto_map": {"AutoModel": "code.py"}},
        )
        write_json_file(tmp_path / "tokenizer_config.json", {"tokenizer_class": "TokenizersBackend"})
        assert make_readable_by_transformers_4(tmp_path, "XForCausalLM") == []
        written = json.loads((tmp_path / "config.json").read_text())
        assert written == {
            "model_type": model_type,
            "rope_parameters": rope,
            "architectures": ["XForCausalLM"],
            **expected,
        }
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.slow
def test_rotary_settings_that_only_version_5_reads_stay(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "rope_parameters": rope}
    write_json_file(tmp_path / "config.json", config)
    write_json_file(tmp_path / "tokenizer_config.json", {})
    assert len(make_readable_by_transformers_4(tmp_path, "Gemma4ForCausalLM")) == 1
    assert json.loads((tmp_path / "config.json").read_text()) == config


@pytest.mark.slow
def test_converter_runs_in_a_process_and_its_file_is_compared(hf_folder: Path, tmp_path: Path) -> None:
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys; sys.exit('no such architecture')")
    with pytest.raises(UserError, match="the converter failed: no such architecture"):
        run_export(hf_folder, tmp_path / "to", format="gguf", converter=str(converter))
    run_export(hf_folder, tmp_path / "right", format="gguf", verify=False)
    converter.write_text(
        f"import shutil, sys; shutil.copy({str(tmp_path / 'right' / 'model.gguf')!r}, sys.argv[sys.argv.index('--outfile') + 1])"
    )
    run_export(hf_folder, tmp_path / "to", format="gguf", converter=str(converter))
    source = load_trained(hf_folder, "cpu")
    next(source.model.parameters()).data *= 1.01
    with pytest.raises(UserError, match="the norm of all matrices"):
        check_converted(str(converter), tmp_path / "to" / "model.gguf", source, "float32")
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.slow
def test_exported_checkpoint_is_the_model_of_that_step(call: Call, workspace: Path) -> None:
    (out := workspace / "exported").mkdir()
    pretrain = [f"data.path={SAMPLES / 'pretrain.jsonl'}", "train.save_every=1", f"hydra.run.dir={workspace / 'run'}"]
    lora = [
        "stage=lora",
        f"init_from={workspace / 'run'}",
        f"data.path={SAMPLES / 'lora_identity.jsonl'}",
        f"hydra.run.dir={workspace / 'lora'}",
    ]
    continued = [*lora[:1], f"init_from={workspace / 'lora'}", *lora[2:3], "stage.lora.continue_adapter=true"]
    continued.append(f"hydra.run.dir={workspace / 'continued'}")
    for overrides in (pretrain, lora, continued):
        done = call(*(TINY_RUN if overrides is pretrain else TINY_RUN[len(TINY_MODEL) :]), *overrides)
        assert done.returncode == 0, done.stderr
    for name, kind in (("run", "hf"), ("lora", "merged"), ("continued", "merged")):
        for checkpoint, same in (("latest", True), ("step-00000001", False)):
            if (workspace / name / "checkpoints" / checkpoint).exists():
                run_export(
                    workspace / name / "checkpoints" / checkpoint,
                    out / f"{name}-{checkpoint}",
                    format=kind,
                    verify=False,
                )
                difference = (
                    (load_model(out / f"{name}-{checkpoint}")(IDS).logits - load_model(workspace / name)(IDS).logits)
                    .abs()
                    .max()
                )
                assert (difference < 1e-5) == same
    run_export(workspace / "lora" / "checkpoints" / "latest", out / "peft", format="peft", verify=False)
    assert torch.equal(load_model(out / "peft")(IDS).logits, load_model(workspace / "lora")(IDS).logits)
    weights = workspace / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="this checkpoint is damaged"):
        run_export(weights.parent, out / "damaged")


def llama_cpp(folder: Path) -> Any:
    """Return a server of llama.cpp in this process; its default for the cache, float16, would round."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="a build of llama.cpp; part of the extra dev")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup, params.n_parallel = (
        str(folder / "model.gguf"),
        128,
        0,
        False,
        1,
    )
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(params)


def first_token(server: Any, prompt: str | list[int]) -> tuple[int, dict[int, float]]:
    """Return how many tokens the prompt has, and the log-probabilities of the likeliest next ones by id."""
    result = server.handle_completions(
        {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 8, "n_probs": 8}
    )
    listed = (result["choices"][0]["logprobs"] or {"content": []})["content"]
    return result["usage"]["prompt_tokens"], {
        each["id"]: each["logprob"] for each in (listed[0]["top_logprobs"] if listed else [])
    }


GREEDY: dict = {"temperature": 0, "top_k": 0, "top_p": 1, "repetition_penalty": 1}
HARD_TEXTS = (
    *verify.TEXTS,
    "It's  they'LL 've\n\n\n  \t x\r\n   ",
    "１２３ ٤٥ ½² 1234567 3.14e-10",
    "e\u0301 한국어 ไทย עברית \u200d\ufeff\u3000全角　、。「」",
    "👩‍👩‍👧‍👦🏳️‍🌈🇨🇳 ¯\\_(ツ)_/¯ \x00\x7f",
)


@pytest.mark.slow
def test_llama_cpp_answers_as_a_trained_run(call: Call, workspace: Path, tmp_path: Path) -> None:
    done = call(
        *TINY_RUN,
        "optimizer.lr=1e-2",
        "train.max_steps=40",
        "train.batch_size=4",
        "data.max_length=64",
        f"data.path={SAMPLES / 'pretrain.jsonl'}",
        f"hydra.run.dir={workspace / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    run_export(workspace / "run", tmp_path / "to", format="gguf")
    server, trained = llama_cpp(tmp_path / "to"), load_trained(workspace / "run", "cpu")
    compared = 0  # tokens of answers
    for text in HARD_TEXTS:
        ids = [*trained.tokenizer.bos_ids, *trained.tokenizer.encode(text)]
        tokens, found = first_token(server, text)
        assert (tokens, found) == (len(ids), pytest.approx(first_token(server, ids)[1], abs=1e-3))
        prompt = text[: len(text) // 2]
        ids = [*trained.tokenizer.bos_ids, *trained.tokenizer.encode(prompt)]
        answer = generate(trained.model, [ids], max_new_tokens=24, stop_ids=list(trained.tokenizer.stop_ids), **GREEDY)[
            0
        ]
        likeliest = trained.model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 :].topk(2).values
        # tokens before a tie that rounding decides
        sure = int((likeliest[:, 0] - likeliest[:, 1] > 1e-3).int().cumprod(0).sum())
        result = server.handle_completions({"prompt": prompt, "max_tokens": 24, "temperature": 0, "top_k": 1})
        answered = result["choices"][0]["text"].rstrip("\ufffd")
        if sure > len(answer):
            assert answered == trained.tokenizer.decode(answer).rstrip("\ufffd")
            assert result["usage"]["completion_tokens"] - len(answer) in (0, 1)  # it counts the token that stops
        else:
            assert answered.startswith(trained.tokenizer.decode(answer[:sure]).rstrip("\ufffd"))
        compared += min(sure, len(answer))
    assert compared > 100


@pytest.mark.slow
def test_llama_cpp_computes_every_shape_that_is_written(write_model: Callable[..., Path], tmp_path: Path) -> None:
    llama, moe = {"qk_norm": False}, {"num_experts": 4, "norm_topk_prob": True}
    shapes: dict[str, dict] = {
        "llama3": llama
        | {"attention_bias": True, "attention_out_bias": True, "rope_scaling": RopeScaling(4.0, 32, type="llama3")},
        "mistral": llama
        | {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": False, "mlp_bias": False},
        "qwen2": llama | {"attention_bias": True, "rope_scaling": RopeScaling(4.0, type="linear")},
        "qwen3": {"rope_scaling": RopeScaling(4.0, 32, attention_factor=1.3)},
        "qwen3_moe": moe,
        "mixtral": moe | llama,
    }
    for name, changes in shapes.items():
        folder = write_model(tmp_path / name, seed=0, std=0.3, **changes)
        run_export(folder, tmp_path / f"{name}-gguf", format="gguf", verify=False)
        server, trained = llama_cpp(tmp_path / f"{name}-gguf"), load_trained(folder, "cpu")
        compared = 0
        for text in verify.TEXTS:
            ids = trained.tokenizer.encode(text)
            log_probs = trained.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).tolist()
            _, found = first_token(server, ids)
            assert all(abs(log_probs[token] - value) < ROUNDING_OF_LLAMA_CPP for token, value in found.items()), name
            compared += len(found)
        assert compared >= 8, name


@pytest.mark.slow
def test_gguf_of_a_llama_has_its_rotary_pairs_side_by_side(write_model: Callable[..., Path], tmp_path: Path) -> None:
    from gguf import GGUFReader

    folder = write_model(tmp_path / "model", seed=0, qk_norm=False)
    run_export(folder, tmp_path / "to", format="gguf", dtype="float32")
    stored = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "to" / "model.gguf").tensors}
    attention = load_model(folder).model.layers[0].self_attn
    for name, linear in (("attn_q", attention.q_proj), ("attn_k", attention.k_proj)):
        weight, written = linear.weight.detach(), torch.from_numpy(stored[f"blk.0.{name}.weight"].copy())
        # heads of 8 channels
        rows = [head + half * 4 + pair for head in range(0, len(weight), 8) for pair in range(4) for half in range(2)]
        assert torch.equal(written, weight[rows]), name


@pytest.mark.slow
def test_gguf_has_the_scaling_of_the_rotary_embeddings(write_model: Callable[..., Path], tmp_path: Path) -> None:
    from gguf import GGUFReader

    yarn = RopeScaling(4.0, 32, beta_fast=32.0, beta_slow=1.0, attention_factor=1.5)
    run_export(write_model(tmp_path / "a", seed=0, rope_scaling=yarn), tmp_path / "yarn", format="gguf")
    fields = GGUFReader(tmp_path / "yarn" / "model.gguf").fields
    factor = next(field.contents() for name, field in fields.items() if name.endswith("attn_factor"))
    assert factor * (0.1 * math.log(4.0) + 1) == pytest.approx(1.5, rel=1e-5)  # llama.cpp multiplies the two

    llama3 = RopeScaling(4.0, 32, type="llama3")
    run_export(
        write_model(tmp_path / "b", seed=0, qk_norm=False, rope_scaling=llama3), tmp_path / "llama3", format="gguf"
    )
    (factors,) = (
        tensor.data
        for tensor in GGUFReader(tmp_path / "llama3" / "model.gguf").tensors
        if tensor.name == "rope_freqs.weight"
    )
    # frequencies are divided by them
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(4.0) and all(1 <= factor <= 4 for factor in factors)
