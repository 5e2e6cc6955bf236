"""Runs with adapters: a run trains an adapter on, 4-bit weights need bitsandbytes, and each variant resumes bitwise
equal.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_fixtures import SMALL_LORA, composed, stage_overrides, write_examples
from tiny_models import TOKENIZER, lora_config, max_difference, random_model, tokens

from common.errors import Interrupted, UserError
from models.formats.json_files import read_adapter_settings
from models.formats.load import load_model
from models.formats.save import save_adapter, save_model
from models.language_model import count_parameters
from models.lora import adapter_state_dict, add_lora
from runner.engine.build import build_run
from runner.engine.config import Config
from runner.engine.loop import train
from runner.engine.state import TrainState
from runner.engine.verify_resume import diff_run_dirs
from runner.run_dir.metadata import RunMetadata

IDS = tokens(2, 12)
VARIANTS = {
    "dora": "dora:true,rslora:true",
    "nf4": "quantize:nf4,dora:true",
}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes, of the extra qlora, is not in the dev extra"
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = random_model(std=0.1, tie_word_embeddings=False)
    save_model(tmp_path / "base", model, model.cfg, TOKENIZER)
    return tmp_path / "base"


def config_of(base: Path, tmp_path: Path, lora: str, init_from: Path | None = None) -> Config:
    defaults = "rslora:false,dora:false,quantize:null,continue_adapter:false"
    changed = {pair.split(":")[0]: pair for pair in [*defaults.split(","), *lora.split(",")]}
    setting = SMALL_LORA.replace(defaults, ",".join(changed.values()))
    start = f"init_from={init_from or base}"
    cfg = composed(
        *stage_overrides("lora"),
        start,
        setting,
        f"data.cache={tmp_path / 'cache'}",
        "train.max_steps=3",
        "train.save_every=2",
    )
    data = dataclasses.replace(cfg.data, path=str(write_examples(tmp_path, "chat", 12)))
    return dataclasses.replace(cfg, model=load_model(base).cfg, data=data)


def has_reached(state: TrainState, stop: int | None) -> bool:
    return state.progress.step == stop


def run(cfg: Config, run_dir: Path, stops: tuple[int, ...] = ()) -> Path:
    torch.set_num_threads(1)
    run_dir.mkdir()
    for attempt, stop in enumerate([*stops, None], 1):
        state = build_run(cfg, RunMetadata.detached(run_dir, attempt))
        try:
            train(state, stop_requested=partial(has_reached, state, stop))
        except Interrupted:
            state.logger.finish("interrupted")
        torch.manual_seed(attempt)
    state.logger.finish("completed")
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dora", pytest.param("nf4", marks=needs_bitsandbytes)])
def test_lora_variant_is_resumed_bitwise_equal(variant: str, base: Path, tmp_path: Path) -> None:
    cfg = config_of(base, tmp_path, VARIANTS[variant])
    assert diff_run_dirs(run(cfg, tmp_path / "whole"), run(cfg, tmp_path / "stopped", (1,))) == []
    stored = read_adapter_settings(tmp_path / "whole")
    assert (stored["dora"], stored["rslora"]) == (True, variant == "dora")
    names = {file.name for file in (tmp_path / "whole" / "model").iterdir()}
    assert not any("base" in name or name.startswith("model") for name in names)


@pytest.mark.slow
@torch.no_grad()
def test_run_trains_an_adapter_on_and_keeps_its_base_model(base: Path, tmp_path: Path) -> None:
    model, lora = load_model(base), lora_config(rank=2, alpha=3.0, targets=["0.self_attn.q_proj", "1.mlp.up_proj"])
    add_lora(model, lora)
    for p in adapter_state_dict(model).values():
        torch.nn.init.normal_(p, std=0.1)
    save_adapter(tmp_path / "adapter", model, lora, str(base), TOKENIZER)
    cfg = config_of(base, tmp_path, "continue_adapter:true", tmp_path / "adapter")
    state = build_run(cfg, RunMetadata.detached(tmp_path / "first", 1))
    assert torch.equal(state.model.cpu()(IDS).logits, model(IDS).logits)
    with torch.enable_grad():
        trained = load_model(run(cfg, tmp_path / "run"))
    before, after = adapter_state_dict(model), adapter_state_dict(trained)
    assert {name: p.shape for name, p in before.items()} == {name: p.shape for name, p in after.items()}
    assert 0 < max(max_difference(after[name], p) for name, p in before.items()) < 0.1
    assert not (tmp_path / "run" / "model" / "base").exists()
    assert load_model(tmp_path / "run").cfg == model.cfg


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="the refusal is for machines without bitsandbytes"
)
def test_quantized_weights_without_bitsandbytes_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs? the package bitsandbytes, which is not installed") as error:
        build_run(config_of(base, tmp_path, "quantize:nf4"), RunMetadata.detached(tmp_path / "run", 1))
    assert "pip install bitsandbytes" in error.value.fix


def test_quantized_weights_are_refused_where_they_make_no_sense(base: Path, tmp_path: Path) -> None:
    cfg = config_of(base, tmp_path, "quantize:nf4")
    with pytest.raises(UserError, match="random weights need no quantization"):
        dataclasses.replace(cfg, init_from="scratch")
    with pytest.raises(UserError, match="distributed=fsdp cannot share quantized weights"):
        dataclasses.replace(cfg, distributed=dataclasses.replace(cfg.distributed, name="fsdp"))


@needs_bitsandbytes
@torch.no_grad()
def test_quantized_layers_compute_the_product_of_their_dequantized_weights() -> None:
    from models.layers.adapter import Linear4bit, quantize_linear_layers

    model = random_model(std=0.1, tie_word_embeddings=False)
    before, parameters = model(IDS).logits, count_parameters(model)
    quantize_linear_layers(model, torch.device("cpu"))
    assert count_parameters(model) == parameters
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 14 and type(model.lm_head) is not Linear4bit
    x = torch.randn(3, layers[0].in_features)
    assert max_difference(layers[0](x), x @ layers[0].dequantized().T) < 1e-5
    assert 1e-3 < max_difference(model(IDS).logits, before)
    add_lora(model, lora_config(targets=["q_proj"], dora=True))
    assert torch.equal(
        model.model.layers[0].self_attn.q_proj.lora["default"].magnitude,
        torch.linalg.norm(layers[0].dequantized(), dim=1),
    )


@needs_bitsandbytes
def test_quantization_of_a_model_without_linear_layers_is_refused() -> None:
    from models.layers.adapter import quantize_linear_layers

    with pytest.raises(UserError, match="no layer of this model is an nn.Linear"):  # GPT-2 has Conv1D
        quantize_linear_layers(torch.nn.Embedding(4, 4), torch.device("cpu"))
