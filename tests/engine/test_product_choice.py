"""How a run multiplies 16-bit matrices on the CPU: in fp32 where the processor is slow in 16 bits, the same after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.errors import Interrupted
from models.layers.cpu_kernels.library import KernelsUnavailableError
from models.layers.cpu_kernels.upcast_products import are_products_by_kernel, are_products_upcast, upcast_products
from runner.engine import kernel_choice
from runner.engine import kernels as kernels_of_run
from runner.engine.device.compile import CompileDecision
from runner.engine.kernel_choice import are_16_bits_fast, load_products
from runner.engine.loop import train
from runner.engine.open_logs import run_summary
from runner.engine.verify_resume import diff_run_dirs

SETTINGS = ["precision=bf16", "train.max_steps=4", "train.save_every=2"]


@pytest.fixture(autouse=True)
def is_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """`is_fast(True)`: a processor with instructions for 16 bits; by default one without them."""

    def is_fast(value: bool) -> None:
        monkeypatch.setattr(kernels_of_run, "are_16_bits_fast", lambda dtype: value)

    is_fast(False)
    yield is_fast
    upcast_products(False)


@pytest.mark.parametrize("precision, upcast", [("bf16", True), ("fp16", True), ("fp32", False)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_products_in_16_bits_are_in_fp32_on_a_processor_that_is_slow_in_them(
    optimizer: str, precision: str, upcast: bool, make_run: Callable
) -> None:
    state = make_run("pretrain", f"precision={precision}", f"optimizer={optimizer}", "train.max_steps=1")
    is_chosen = upcast or optimizer == "muon"
    assert are_products_upcast() == upcast
    assert state.compatibility.get("environment.products") == ("fp32" if is_chosen else None)
    assert ("products" in run_summary(state)) == is_chosen
    if optimizer == "muon":
        assert state.optimizers.parts[0].dtype == torch.float32


def test_products_stay_as_they_are_on_a_processor_that_is_fast_in_them(
    make_run: Callable, is_fast: Callable[[bool], None]
) -> None:
    is_fast(True)
    state = make_run("pretrain", *SETTINGS, "optimizer=muon")
    assert "environment.products" not in state.compatibility and not are_products_upcast()
    assert "products" not in run_summary(state) and state.optimizers.parts[0].dtype == torch.bfloat16


def test_one_slow_rank_decides_for_all(make_run: Callable, is_fast: Callable[[bool], None]) -> None:
    """Otherwise ranks on other processors would wait for a choice that is none there."""
    is_fast(True)
    state = make_run("pretrain", *SETTINGS)
    for is_slow in (False, True):
        others = SimpleNamespace(any=lambda flag, is_slow=is_slow: flag or is_slow)
        parts = [state.model], state.optimizers, state.precision
        choices = kernels_of_run.cpu_choices(*parts, others, is_long=False, is_resumed=False)
        assert [choice.fact for choice in choices] == ["products"] * is_slow


@pytest.mark.parametrize(
    "cpu, features, fast",
    [
        ("AMD EPYC", [], {}),
        ("AMD EPYC", ["avx512_bf16"], {"bfloat16"}),
        ("Intel Xeon", ["avx512_bf16"], {}),
        ("Intel Xeon", ["avx512_bf16", "amx_tile"], {"bfloat16"}),
        ("Intel Xeon", ["avx512_bf16", "amx_tile", "amx_fp16"], {"bfloat16", "float16"}),
        ("arm64", ["oneDNN", "bf16"], {"bfloat16"}),
        ("arm64", ["oneDNN"], {}),
        ("arm64", [], {}),
    ],
    ids=["AVX2", "Zen 4", "AVX-512 of Intel", "AMX", "AMX with fp16", "Graviton 3", "Graviton 2", "Mac"],
)
def test_processors_that_are_fast_in_16_bits(
    cpu: str, features: list[str], fast: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_bf16() -> bool:
        assert "oneDNN" in features  # torch has no such operator without it
        return "bf16" in features

    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(kernel_choice, "cpu_model", lambda: cpu)
    monkeypatch.setattr(kernel_choice.platform, "machine", lambda: "arm64" if cpu == "arm64" else "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: "oneDNN" in features)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", has_bf16, raising=False)
    for feature in ("avx512_bf16", "amx_tile", "amx_fp16"):
        monkeypatch.setattr(torch.cpu, f"_is_{feature}_supported", lambda feature=feature: feature in features)
    assert [name for name in ("bfloat16", "float16") if are_16_bits_fast(getattr(torch, name))] == sorted(fast)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not are_16_bits_fast(torch.bfloat16)


@pytest.mark.parametrize("name", ["code_fingerprint", "cpu_model"])
def test_resume_of_other_code_or_on_another_processor_chooses_as_a_new_run(
    name: str, make_run: Callable, is_fast: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not exact, and would otherwise stay as slow, or as fast, as where it began."""
    is_fast(True)
    state = make_run("pretrain", *SETTINGS)
    with pytest.raises(Interrupted):
        train(state, stop_requested=lambda: state.progress.step == 2)
    is_fast(False)
    monkeypatch.setattr(kernels_of_run, name, lambda: "another")
    resumed = make_run("pretrain", *SETTINGS, attempt=2)
    assert resumed.compatibility["environment.products"] == "fp32" and are_products_upcast()


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in fp32", "native"])
@pytest.mark.parametrize(
    "settings", [SETTINGS, [*SETTINGS, "optimizer=muon", "precision=fp32"]], ids=["bf16", "muon in fp32"]
)
def test_resume_repeats_the_products_of_its_checkpoint_bitwise_equal(
    settings: list[str], make_run: Callable, is_fast: Callable[[bool], None], fast: bool
) -> None:
    """The processor of the resume does not matter, nor another run of this process in between."""
    is_fast(fast)
    whole = make_run("sft", *settings, folder="whole")
    train(whole)
    stopped = make_run("sft", *settings, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    is_fast(not fast)
    make_run("pretrain", "train.max_steps=1", folder="between")
    assert not are_products_upcast()
    resumed = make_run("sft", *settings, folder="stopped", attempt=2)
    assert are_products_upcast() == (not fast and settings == SETTINGS)
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed")
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@pytest.mark.slow
def test_resume_of_a_long_run_repeats_its_kernel_bitwise_equal(
    make_run: Callable, is_fast: Callable[[bool], None], kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=True)
    )
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("the kernel needs AVX-512")
    whole = make_run("sft", *SETTINGS, folder="whole")
    assert whole.compatibility["environment.products"] == "cpp" and are_products_by_kernel()
    assert run_summary(whole)["products"] == "by the C++ kernel"
    train(whole)
    stopped = make_run("sft", *SETTINGS, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    is_fast(True)
    resumed = make_run("sft", *SETTINGS, folder="stopped", attempt=2)
    assert are_products_by_kernel() and run_summary(resumed)["products"] == "by the C++ kernel, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed")
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


def test_kernel_is_not_available_without_avx_512(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With fewer registers it is slow; and where ATEN_CPU_CAPABILITY emulates an older processor, it would still be
    compiled for this one.
    """
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    load_products("fp32")
    with pytest.raises(KernelsUnavailableError, match="it needs AVX-512, and torch uses AVX2"):
        load_products("cpp")
    assert not list(tmp_path.iterdir())  # nothing was compiled


def test_gradients_with_products_in_fp32_are_those_of_bf16_up_to_rounding(
    make_run: Callable, is_fast: Callable[[bool], None]
) -> None:
    gradients = []
    for folder in ("fp32", "native"):
        is_fast(folder == "native")
        state = make_run("pretrain", "precision=bf16", "train.max_steps=1", "model.num_hidden_layers=1", folder=folder)
        batch = next(iter(next(iter(state.loader.iter_epoch(0)))))
        with state.precision.autocast():
            loss = state.objective.loss(state.wrapped, batch)["loss"]
        state.precision.backward(loss / batch.input_ids.numel())
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    upcast, native = gradients
    assert 0 < (upcast - native).norm() < 0.01 * native.norm()


def test_torch_without_replaceable_kernels_keeps_its_products(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    state = make_run("pretrain", *SETTINGS)
    assert "environment.products" not in state.compatibility
    assert run_summary(state)["products"] == "in 16 bits; no fp32 kernel: torch.library.get_kernel is missing"
