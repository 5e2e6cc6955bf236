"""Linear layers with the same input: one product or several, the same numbers up to rounding, and the same way after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch

from common.errors import Interrupted
from models.families.decoder import DecoderConfig
from runner.engine import kernels as kernels_of_run
from runner.engine.build import run_summary
from runner.engine.choices.layer_choices import JOINED, SEPARATE, ProjectionShape, measure_projections
from runner.engine.device.compile import CompileDecision
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

SETTINGS = ["train.max_steps=4", "train.save_every=2"]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[ProjectionShape]]:
    """`measured(0.5)`: separate products take that time, and one product 1.0; returns the shapes for which runs ask."""
    monkeypatch.setattr(
        kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=True)
    )

    def measured(separate: float) -> list[ProjectionShape]:
        shapes = list[ProjectionShape]()

        def measure(cfg: DecoderConfig, shape: ProjectionShape, names: list[str]) -> dict[str, float]:
            shapes.append(shape)
            return {JOINED: 1.0, SEPARATE: separate}

        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"programs-{separate}"))  # where times are kept
        monkeypatch.setattr("runner.engine.choices.layer_choices.measure_projections", measure)
        return shapes

    return measured


def joins_of(state) -> set[bool]:
    return {module.joins_projections for layer in state.model.layers for module in (layer.self_attn, layer.mlp)}


@pytest.mark.parametrize("separate, joins", [(0.5, False), (0.95, True)], ids=["faster", "little faster"])
def test_separate_products_are_taken_where_they_are_clearly_faster(
    separate: float, joins: bool, make_run: Callable, measured: Callable
) -> None:
    shapes = measured(separate)
    state = make_run("pretrain", "train.max_steps=1", "train.batch_size=2")
    assert joins_of(state) == {joins}
    cfg = state.cfg.model
    assert (shapes[0].tokens, shapes[0].hidden, shapes[0].width) == (
        2 * state.cfg.data.max_length,
        cfg.hidden_size,
        cfg.intermediate_size,
    )
    assert state.compatibility.get("environment.projections") == (None if joins else SEPARATE)
    assert run_summary(state)["projections"].startswith(
        f"{JOINED if joins else SEPARATE} (measured, ms a network: joined 1000.0"
    )


def test_share_of_an_expert_is_measured_where_experts_have_the_tokens(make_run: Callable, measured: Callable) -> None:
    shapes = measured(0.5)
    experts = ["model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32"]
    state = make_run("pretrain", "train.max_steps=1", "train.batch_size=2", *experts)
    assert (shapes[0].tokens, shapes[0].width) == (state.cfg.data.max_length, 32)
    assert not any(expert.joins_projections for layer in state.model.layers for expert in layer.mlp.experts)


def test_networks_whose_layers_have_adapters_have_no_choice(make_run: Callable, measured: Callable) -> None:
    shapes = measured(0.5)
    state = make_run("lora", "train.max_steps=1", "stage.lora.targets=[gate_proj]", folder="adapters")
    assert not shapes and "projections" not in run_summary(state)
    make_run("lora", "train.max_steps=1", "stage.lora.targets=[q_proj]")
    assert shapes and not shapes[0].is_trained


def test_both_ways_are_measured_with_the_kernels_of_the_shape() -> None:
    cfg = tiny_models.config()
    shape = ProjectionShape(8, cfg.hidden_size, 48, "bfloat16", "auto", has_bias=False, is_trained=True)
    times = measure_projections(cfg, shape, [JOINED, SEPARATE])
    assert set(times) == {JOINED, SEPARATE} and all(seconds > 0 for seconds in times.values())


def test_resume_repeats_the_products_of_its_checkpoint_bitwise_equal(make_run: Callable, measured: Callable) -> None:
    measured(0.5)
    whole = make_run("sft", *SETTINGS, folder="whole")
    train(whole)
    stopped = make_run("sft", *SETTINGS, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    shapes = measured(2.0)
    resumed = make_run("sft", *SETTINGS, folder="stopped", attempt=2)
    assert joins_of(resumed) == {False} and not shapes
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-6), ("bf16", 0.01)])
@pytest.mark.parametrize(
    "settings",
    [[], ["model.mlp_bias=true", "model.attention_bias=true", "model.attention_out_bias=true", "model.qk_norm=false"]],
    ids=["plain", "biases"],
)
def test_gradients_of_separate_products_are_those_of_one_up_to_rounding(
    settings: list[str], precision: str, tolerance: float, make_run: Callable, measured: Callable
) -> None:
    gradients = []
    for folder, separate in (("separate", 0.5), ("joined", 2.0)):
        measured(separate)
        state = make_run("pretrain", f"precision={precision}", "train.max_steps=1", *settings, folder=folder)
        batch = state.loader.first_batch()
        with state.precision.autocast():
            loss = state.objective.loss(state.wrapped, batch)["loss"]
        state.precision.backward(loss / batch.input_ids.numel())
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    separate_products, one_product = gradients
    assert 0 < (separate_products - one_product).norm() < tolerance * one_product.norm()
