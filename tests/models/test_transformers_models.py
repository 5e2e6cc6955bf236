"""Models of transformers in the engine's interface: losses, gradients, packed rows, generation and export equal those
of transformers, or are refused.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from tiny_models import TOKENIZER, max_difference
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_families import FAMILIES, SIZES, random_family, write_family

from common.errors import UserError
from models.families.transformers import TransformersConfig, _without_unread, create_hf_config
from models.formats.json_files import read_model_config
from models.formats.load import load_into, load_model, load_weights
from models.formats.save import save_model
from models.generate import generate
from models.language_model import LanguageModel, create_model
from models.transformers_adapter.attention import IMPLEMENTATION
from runner.engine.device.compile import resolve_compile_mode

FAST = ("gemma2", "glm_moe_dsa")
LENGTHS = (23, 5, 40)  # longer than the windows of the models

families = pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
    scope="module",  # all tests of a family one after the other
)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_family(folder := tmp_path_factory.mktemp(name), name)
    return folder


@cache
def reference_of(folder: Path) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Return rows of tokens, the losses of their next tokens, and the gradients of the sum, as transformers computes
    them row by row.
    """
    torch.manual_seed(1)
    rows = [torch.randint(3, 6400, (length,)) for length in LENGTHS]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    losses = [cross_entropy(hf(row[None], use_cache=False).logits[0, :-1], row[1:], reduction="none") for row in rows]
    torch.cat(losses).sum().backward()
    return (
        rows,
        [loss.detach() for loss in losses],
        {name: p.grad for name, p in hf.named_parameters() if p.grad is not None},
    )


def trained_model(folder: Path, is_packed: bool) -> LanguageModel:
    model = create_model(read_model_config(folder, "transformers"))
    load_into(model, load_weights(folder, "transformers"), str(folder))
    model.kernels_description = model.prepare(is_packed)
    return model.train()


def check_gradients(model: LanguageModel, expected: dict[str, Tensor]) -> None:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert max(max_difference(gradients[name], expected[name]) for name in expected) < 1e-5 * max(1.0, largest)


@pytest.mark.slow
@families
def test_transformers_model_trains_with_label_smoothing_and_z_loss(name: str, folder: Path) -> None:
    """Through the output layer, and of families that scale or cap its logits; evaluations have the plain loss."""
    row = reference_of(folder)[0][0]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    logits, labels = hf(row[None], use_cache=False).logits[0, :-1], row[1:]
    plain = cross_entropy(logits, labels, reduction="sum")
    smoothed = cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    (expected := smoothed + 0.01 * logits.logsumexp(-1).square().sum()).backward()
    model = trained_model(folder, is_packed=False)
    model.use_penalties(0.1, 0.01)
    nll = model(row[None, :-1], labels[None], reduction="sum").nll
    torch.testing.assert_close(nll, expected)
    nll.backward()
    check_gradients(model, {name: p.grad for name, p in hf.named_parameters() if p.grad is not None})
    torch.testing.assert_close(model.eval()(row[None, :-1], labels[None], reduction="sum").nll, plain)


@families
def test_transformers_model_has_the_losses_and_gradients_of_single_rows(name: str, folder: Path) -> None:
    rows, losses, gradients = reference_of(folder)
    model = trained_model(folder, is_packed=False)
    kernels = model.kernels
    assert (kernels.attention == IMPLEMENTATION, kernels.chunked_loss, kernels.packing) == FAMILIES[name][1:4]
    ids, labels = torch.zeros(3, max(LENGTHS), dtype=torch.long), torch.full((3, max(LENGTHS)), -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)], labels[i, : len(row) - 1] = row, row[1:]
    nll = model(ids, labels).nll
    assert max(max_difference(nll[i, : len(row) - 1], losses[i]) for i, row in enumerate(rows)) < 1e-5
    model(ids, labels, reduction="sum").nll.backward()
    check_gradients(model, gradients)


@families
def test_transformers_model_on_packed_rows_equals_single_rows(name: str, folder: Path) -> None:
    if FAMILIES[name].packing == "none":
        with pytest.raises(UserError, match="packed rows of .* would not be exact"):
            trained_model(folder, is_packed=True)
        return
    rows, losses, gradients = reference_of(folder)
    model = trained_model(folder, is_packed=True)
    pad = torch.zeros(4, dtype=torch.long)
    ids = torch.cat([*rows, pad])[None]
    labels = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in rows] + [pad - 100])[None]
    documents = torch.cat([torch.full((len(row),), i) for i, row in enumerate(rows)] + [pad - 1])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows] + [pad])[None]
    arguments = {"document_ids": documents, "position_ids": positions, "lengths": torch.tensor(LENGTHS)}
    nll = model(ids, labels, **arguments).nll[0]
    assert max_difference(torch.cat([part[:-1] for part in nll.split([*LENGTHS, 4])[:-1]]), torch.cat(losses)) < 1e-5
    model(ids, labels, reduction="sum", **arguments).nll.backward()
    check_gradients(model, gradients)


@pytest.mark.slow
@families
def test_transformers_model_is_exported_with_its_logits(name: str, folder: Path, tmp_path: Path) -> None:
    model = trained_model(folder, is_packed=False).eval()
    save_model(tmp_path / "export", model, model.cfg, TOKENIZER)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        assert (
            max_difference(
                AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)(ids).logits, expected
            )
            < 1e-5
        )
        again = load_model(tmp_path / "export")
        assert max_difference(again(ids).logits, expected) < 1e-5


@pytest.mark.slow
@families
def test_transformers_model_generates_the_tokens_of_transformers(name: str, folder: Path) -> None:
    prompts = [list(range(10, 40)), [7, 8, 9]]
    model = trained_model(folder, is_packed=False)
    answers = generate(
        model, prompts, max_new_tokens=12, temperature=0, top_k=0, top_p=1, repetition_penalty=1, stop_ids=[]
    )
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = hf.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert answer == expected[0, len(prompt) :].tolist()


def test_transformers_model_is_probed_with_windows_that_its_rows_exceed() -> None:
    """A mask without the window separates documents and agrees on short rows: longer ones would be attended to beyond
    the window.
    """
    model = random_family("gpt_oss", sliding_window=64, num_local_experts=2, num_experts_per_tok=1)
    model.prepare(is_packed=True)
    assert (model.kernels.packing, model.hf.config.sliding_window) == ("layer_masks", 64)


@pytest.mark.slow
def test_transformers_model_reports_which_attention_is_really_called() -> None:
    for name, line in (("mamba2", "with the layers of its class,"), ("gpt_neox", "with attention of this program,")):
        assert line in str(random_family(name, **FAMILIES[name].changes).prepare(is_packed=False))


def test_input_embedding_of_the_padding_token_is_trained_by_the_decoder(tmp_path: Path) -> None:
    """Documented in models.md: it matters where pad_token_id is a token of the texts, e.g. the end of a message."""
    pad = 7
    write_family(tmp_path, "llama", pad_token_id=pad)
    ids, gradients = torch.tensor([[3, pad, 9, 4, pad, 5]]), {}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for padding in (pad, None):
        reference.zero_grad()
        reference.model.embed_tokens.padding_idx = padding
        reference(ids, labels=ids).loss.backward()
        gradients[padding] = reference.model.embed_tokens.weight.grad.clone()
    for family, padding in (("decoder", None), ("transformers", pad)):
        model = create_model(read_model_config(tmp_path, family))
        load_into(model, load_weights(tmp_path, family), str(tmp_path))
        model(ids[:, :-1], ids[:, 1:]).nll.mean().backward()
        gradient = dict(model.named_parameters())["model.embed_tokens.weight"].grad
        assert max_difference(gradient, gradients[padding]) < 1e-5 * max(1.0, float(gradient.abs().max())) and bool(
            gradient[pad].any()
        ) == (padding is None)


def test_field_of_config_json_that_the_class_computes_has_no_warning() -> None:
    mamba = {
        "model_type": "mamba",
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    for width, count in ((64, 0), (48, 1)):
        assert (
            len(
                TransformersConfig.from_hf_config(
                    mamba | {"intermediate_size": width}, Path("config.json")
                ).training_warnings()
            )
            == count
        )


def compile_reason(name: str, device: str = "cpu", **changes: object) -> str:
    return resolve_compile_mode("auto", 1e20, torch.device(device), 1, random_family(name, **changes).cfg, True).reason


def test_experts_and_attention_dropout_are_not_compiled_by_auto() -> None:
    assert "tokens per expert" in compile_reason("mixtral", num_local_experts=2, num_experts_per_tok=1)
    assert "attention dropout" in compile_reason("gpt2")  # 0.1 by default
    compiled = [compile_reason("llama"), compile_reason("gpt2", attn_pdrop=0.0), compile_reason("gpt2", "cuda")]
    assert all(reason.startswith("default") for reason in compiled)


@pytest.mark.parametrize("name, value", [("num_blocks", 1001), ("num_hidden_layers", 1001), ("n_experts", 4097)])
def test_config_of_transformers_with_too_many_modules_is_refused(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} must be at most"):
        create_hf_config({"model_type": "xlstm", name: value}, "config.json")


def test_config_of_transformers_is_kept_without_code_at_any_depth() -> None:
    raw = {
        "model_type": "gemma2",
        "vision": [{"_attn_implementation": "evil/kernel", "a": 1}],
        "text": {"auto_map": {"AutoModel": "code.py"}, "b": {"c": 2}},
    }
    assert _without_unread(raw) == {"model_type": "gemma2", "vision": [{"a": 1}], "text": {"b": {"c": 2}}}


def test_transformers_model_that_is_not_causal_is_refused() -> None:
    with pytest.raises(UserError, match="BertLMHeadModel is not causal"):
        random_family("bert").prepare(is_packed=False)


def test_packed_rows_are_refused_if_the_weights_cannot_show_a_leak() -> None:
    model = random_family("mistral", sliding_window=None)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with pytest.raises(UserError, match="packed rows of mistral would not be exact"):
        model.prepare(is_packed=True)


def test_fields_of_single_layers_have_no_warning() -> None:
    config = AutoConfig.for_model("gemma4_text", **SIZES).to_dict()
    assert config["per_layer_config"]
    assert TransformersConfig.from_hf_config(config, Path("config.json")).training_warnings() == []
