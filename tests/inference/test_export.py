"""export.py: each format is read again with the model's numbers; what cannot be written is refused and leaves nothing."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tiny_models import lora_config

from common.errors import UserError
from models.formats.load import load_model
from models.formats.save import save_adapter
from models.lora import add_lora
from runner.inference.export import verify
from runner.inference.export.command import ExportSettings, export
from runner.inference.load import load_trained

ROUNDING_OF_LLAMA_CPP = 0.1  # of a logit; these have a standard deviation of 1.7
IDS = torch.arange(3, 30)[None]


def export_config(run: Path, to: Path, **changes: object) -> ExportSettings:
    values: dict = {"run": str(run), "to": str(to), "format": "hf", "dtype": "float32", "max_shard_size": "5GB"}
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
def test_exported_folder_is_compared_and_has_the_dtype(hf_folder: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_exported_adapter_is_merged_or_kept(adapter: Path, tmp_path: Path) -> None:
    expected = load_model(adapter)(IDS).logits
    run_export(adapter, tmp_path / "merged", format="merged")
    assert (load_model(tmp_path / "merged")(IDS).logits - expected).abs().max() < 1e-4
    run_export(adapter, tmp_path / "peft", format="peft")
    assert torch.equal(load_model(tmp_path / "peft")(IDS).logits, expected)


def test_exported_minimind_file_is_read_again(hf_folder: Path, tmp_path: Path) -> None:
    run_export(hf_folder, tmp_path / "to", format="minimind")
    state = torch.load(tmp_path / "to" / "model.pth", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
def test_exported_gguf_file_has_the_weights_and_the_tokenizer(hf_folder: Path, tmp_path: Path, dtype: str) -> None:
    from gguf import GGUFReader

    run_export(hf_folder, tmp_path / "to", format="gguf", dtype=dtype)
    fields = GGUFReader(tmp_path / "to" / "model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 6400
    assert "generation %}" not in fields["tokenizer.chat_template"].contents()


def test_export_that_differs_is_refused_and_leaves_nothing(hf_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.inference.export.whole_model.MAX_DIFFERENCE", -1.0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="differs from the trained model"):
        run_export(hf_folder, tmp_path / "to")
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def own_folder(hf_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hf_folder, tmp_path / "own"))


def test_export_detects_other_token_ids(own_folder: Path) -> None:
    tokenizer = load_trained(own_folder, "cpu").tokenizer
    verify.check_tokenizer(own_folder, tokenizer)
    stored = json.loads((own_folder / "tokenizer.json").read_text())
    stored["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}  # digits are no tokens of their own
    (own_folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="other token ids"):
        verify.check_tokenizer(own_folder, tokenizer)


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
        ({"format": "onnx"}, "format must be one of gguf, hf, merged, minimind, peft"),
        ({"max_shard_size": "big"}, "max_shard_size must be a number above 0 with"),
        ({"converter": "convert.py"}, "converter is read by format=gguf only"),
    ],
)
def test_export_settings_are_checked(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        export_config(tmp_path, tmp_path / "to", **changes)


def test_gguf_of_an_unknown_tokenizer_is_refused(own_folder: Path, tmp_path: Path) -> None:
    stored = json.loads((own_folder / "tokenizer.json").read_text())
    stored["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation", "behavior": "Isolated"})
    (own_folder / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="no name for how this tokenizer splits texts"):
        run_export(own_folder, tmp_path / "to", format="gguf")


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3", "llama", "qwen2"])
def test_llama_cpp_gives_the_answers_of_an_exported_model(write_model, tmp_path: Path, shape: str) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="a build of llama.cpp; part of the extra dev")
    changes: dict = {"qwen3": {}, "llama": {"qk_norm": False}, "qwen2": {"qk_norm": False, "attention_bias": True, "tie_word_embeddings": False}}[shape]
    folder = write_model(tmp_path / "model", seed=0, std=0.3, **changes)
    run_export(folder, tmp_path / "to", format="gguf")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers, params.warmup, params.n_parallel = str(tmp_path / "to" / "model.gguf"), 128, 0, False, 1
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # its default, float16, rounds
    server = xllamacpp.Server(params)
    trained = load_trained(folder, "cpu")
    from models.generate import generate

    compared = 0  # tokens
    for text in verify.TEXTS:
        ids = trained.tokenizer.encode(text)
        answer = generate(
            trained.model, [ids], max_new_tokens=16, temperature=0, top_k=0, top_p=1, repetition_penalty=1, stop_ids=list(trained.tokenizer.stop_ids)
        )[0]
        logits = trained.model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        likeliest = logits.topk(2).values
        close = (likeliest[:, 0] - likeliest[:, 1] < ROUNDING_OF_LLAMA_CPP).tolist()
        sure = answer[: close.index(True)] if any(close) else answer  # the greedy choice of both is the same up to there
        result = server.handle_completions({"prompt": text, "max_tokens": 16, "temperature": 0, "top_k": 1})
        assert result["usage"]["prompt_tokens"] == len(ids)
        assert result["choices"][0]["text"].startswith(trained.tokenizer.decode(sure).rstrip("\ufffd"))
        compared += len(sure)
    assert compared >= 8
