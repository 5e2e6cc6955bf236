"""How a run multiplies 16-bit matrices on the CPU: in fp32 where that was measured to be faster, the same after a
resume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.errors import Interrupted
from models.layers.cpu_kernels.library import KernelsUnavailableError
from models.layers.cpu_kernels.upcast_products import are_products_by_kernel, are_products_upcast, upcast_products
from runner.engine import kernels as kernels_of_run
from runner.engine.autotune import candidates
from runner.engine.autotune.candidates import (
    MIN_RUN_FLOPS,
    ProductShape,
    load_products,
    measure_products,
    product_choice,
)
from runner.engine.device.compile import CompileDecision
from runner.engine.kernels import main_linear, measured_facts
from runner.engine.loop import train
from runner.engine.open_logs import run_summary
from runner.engine.verify_resume import diff_run_dirs

SETTINGS = ["precision=bf16", "train.max_steps=4", "train.save_every=2"]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`measured(fp32=0.5)`: products in fp32 take that time, those of the C++ kernel half of it, and torch's own 1.0;
    by default 0.5.

    Runs are planned with MIN_RUN_FLOPS, which is too short for the kernel.
    """
    monkeypatch.setattr(
        kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", planned_flops=MIN_RUN_FLOPS)
    )

    def measured(fp32: float) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"programs-{fp32}"))  # where times are kept
        monkeypatch.setattr(
            candidates,
            "measure_products",
            lambda shape, kernels: {
                name: seconds
                for name, seconds in {"native": 1.0, "fp32": fp32, "cpp": fp32 / 2}.items()
                if name in kernels
            },
        )

    measured(fp32=0.5)
    yield measured
    upcast_products(False)


@pytest.mark.parametrize("precision, products", [("bf16", "fp32"), ("fp16", "fp32"), ("fp32", None)])
def test_products_of_a_run_in_16_bits_are_in_fp32_where_that_is_faster(
    precision: str, products: str | None, make_run: Callable
) -> None:
    state = make_run("pretrain", f"precision={precision}", "train.max_steps=1")
    assert state.compatibility.get("environment.products") == products and are_products_upcast() == (
        products is not None
    )
    assert ("products" in run_summary(state)) == (products is not None)


def test_products_stay_as_they_are_where_fp32_gains_little(make_run: Callable, measured: Callable[..., None]) -> None:
    measured(fp32=0.95)
    state = make_run("pretrain", *SETTINGS)
    assert "environment.products" not in state.compatibility and not are_products_upcast()
    assert run_summary(state)["products"].startswith("in bfloat16 (measured, ms a linear layer: in bfloat16 1000.0")


def test_products_of_a_short_run_are_not_measured(make_run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is attention in a run that is long enough for this choice only."""
    assert "environment.attention" not in make_run("pretrain", *SETTINGS, folder="long enough").compatibility
    monkeypatch.setattr(
        kernels_of_run,
        "resolve_compile_mode",
        lambda *_: CompileDecision("off", "off", planned_flops=MIN_RUN_FLOPS / 2),
    )
    assert "environment.products" not in make_run("pretrain", *SETTINGS, folder="short").compatibility
    assert not are_products_upcast()


@pytest.mark.parametrize(
    "kernel, other", [(0.5, 2.0), pytest.param(2.0, 0.5, marks=pytest.mark.slow)], ids=["in fp32", "native"]
)
def test_resume_repeats_the_products_of_its_checkpoint_bitwise_equal(
    make_run: Callable, measured: Callable[..., None], kernel: float, other: float
) -> None:
    """What was measured since does not matter, nor another run of this process in between."""
    measured(fp32=kernel)
    whole = make_run("sft", *SETTINGS, folder="whole")
    train(whole)
    stopped = make_run("sft", *SETTINGS, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    measured(fp32=other)
    make_run("pretrain", "train.max_steps=1", folder="between")
    assert not are_products_upcast()
    resumed = make_run("sft", *SETTINGS, folder="stopped", attempt=2)
    assert are_products_upcast() == (kernel < 1)
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@pytest.mark.slow
def test_resume_of_a_long_run_repeats_its_kernel_bitwise_equal(
    make_run: Callable, measured: Callable[..., None], kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=True)
    )
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("the kernel needs AVX-512")
    whole = make_run("sft", *SETTINGS, folder="whole")
    assert whole.compatibility["environment.products"] == "cpp" and are_products_by_kernel()
    assert run_summary(whole)["products"].startswith(
        "by the C++ kernel (measured, ms a linear layer: in bfloat16 1000.0"
    )
    train(whole)
    stopped = make_run("sft", *SETTINGS, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    measured(fp32=2.0)
    resumed = make_run("sft", *SETTINGS, folder="stopped", attempt=2)
    assert are_products_by_kernel() and run_summary(resumed)["products"] == "by the C++ kernel, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


def test_kernel_is_not_available_without_avx_512(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With fewer registers it is slow; and where ATEN_CPU_CAPABILITY emulates an older processor, it would still be
    compiled for this one.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    load_products("fp32", tmp_path)
    with pytest.raises(KernelsUnavailableError, match="it needs AVX-512, and torch uses AVX2"):
        load_products("cpp", tmp_path)
    assert not list(tmp_path.iterdir())  # nothing was compiled


def test_gradients_with_products_in_fp32_are_those_of_bf16_up_to_rounding(
    make_run: Callable, measured: Callable[..., None]
) -> None:
    gradients = []
    for folder, fp32 in (("fp32", 0.5), ("native", 2.0)):
        measured(fp32=fp32)
        state = make_run("pretrain", "precision=bf16", "train.max_steps=1", "model.num_hidden_layers=1", folder=folder)
        batch = next(iter(next(iter(state.loader.iter_epoch(0)))))
        with state.precision.autocast():
            loss = state.objective.loss(state.wrapped, batch)["loss"]
        state.precision.backward(loss / batch.input_ids.numel())
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    upcast, native = gradients
    assert 0 < (upcast - native).norm() < 0.01 * native.norm()


def test_torch_without_replaceable_kernels_keeps_its_products(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(KernelsUnavailableError, match="get_kernel"):
        load_products("fp32", tmp_path)


def test_products_are_measured_beside_torchs_own_and_leave_the_choice(kernels: None) -> None:
    shape = ProductShape(tokens=64, outputs=96, inputs=64, dtype="bfloat16")
    upcast_products(True, by_kernel=True)
    times = measure_products(shape, ["native", "fp32", "cpp"])
    assert (
        are_products_by_kernel()
        and set(times) == {"native", "fp32", "cpp"}
        and all(seconds > 0 for seconds in times.values())
    )


def test_products_are_measured_where_those_of_torch_are_very_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 GFLOP/s without instructions for 16 bits: matrices of all sizes would take longer than the limit, and none
    would be compared.
    """
    native = candidates._native

    def slow(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor) -> None:
        clock[0] += 6 * len(x) * weight.numel() / 1e8
        native(x, g, weight)

    clock = [0.0]
    monkeypatch.setattr(candidates, "_native", slow)
    monkeypatch.setattr("runner.engine.autotune.kernel_choice.time.perf_counter", lambda: clock[0] + time.monotonic())
    times = measure_products(
        ProductShape(tokens=8_192, outputs=11_008, inputs=1_024, dtype="bfloat16"), ["native", "fp32"]
    )
    assert times["fp32"] < times["native"] < 1


def test_products_are_measured_on_the_linear_layers_with_most_weights() -> None:
    layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in ((64, 32), (64, 32), (32, 100), (8, 8))]
    assert main_linear(torch.nn.Sequential(*layers)) == (32, 64)
    assert main_linear(torch.nn.Embedding(4, 4)) is None


def test_other_kernels_are_measured_for_these_products() -> None:
    choice = product_choice(ProductShape(64, 96, 64, "bfloat16"), has_kernel=False)
    before = measured_facts()
    choice.apply("fp32")
    assert measured_facts() != before
    choice.apply("native")
    assert measured_facts() == before
