"""The kernel of attention on the CPU: measured for long runs, kept for later ones, the same after a resume and on every rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import Interrupted
from models.layers.attention import CPU_KERNELS
from models.layers.cpu_kernels import fused_attention, library
from models.layers.cpu_kernels.library import KernelsUnavailableError
from runner.engine import build
from runner.engine.build import run_summary
from runner.engine.device.compile import CompileDecision
from runner.engine.device.cpu import attention_choice
from runner.engine.device.cpu.attention_choice import CANDIDATES, AttentionShape, choose_attention, common_choice, measure_kernels
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

SHAPE = AttentionShape(rows=2, tokens=96, documents=3, heads=4, key_heads=2, head_width=32, dtype="float32")
HEADS_OF_16 = ["model.head_dim=16", "model.attention=auto"]


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of compiled programs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`fast(kernel)`: long runs measure this one as the fastest, without compiled layers."""

    def fast(kernel: str, seconds: float = 0.5) -> None:
        monkeypatch.setattr(attention_choice, "measure_kernels", lambda shape, kernels: dict.fromkeys(kernels, 1.0) | {kernel: seconds})

    monkeypatch.setattr(build, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=True))
    return fast


def no_kernels(folder: Path) -> None:
    raise KernelsUnavailableError("no C++ compiler")


def kernels_of(state) -> set[str]:
    return {layer.self_attn.attention_kernel for layer in state.model.layers}


def test_kernels_are_measured_in_turns_and_all_compute_the_shape() -> None:
    times = measure_kernels(SHAPE, [name for name in CANDIDATES if name != "fused"])
    assert set(times) == {"auto", "blocks-32", "blocks-128"} and all(seconds > 0 for seconds in times.values())


def test_choice_is_the_fastest_kernel_if_it_is_clearly_faster_and_is_kept(programs: Path, fast: Callable[..., None]) -> None:
    fast("blocks-32", 0.95)
    assert choose_attention(SHAPE, programs, {}).kernel == "auto"
    fast("blocks-32", 0.5)
    assert choose_attention(SHAPE, programs, {}).kernel == "auto"  # measured before
    assert choose_attention(SHAPE, programs, {"threads": 2}).kernel == "blocks-32"
    fast("blocks-128", 0.5)
    assert choose_attention(SHAPE, programs, {"threads": 2}).reason.startswith("blocks-32 (measured, ms a layer: blocks-64 1000.0, blocks-32 500.0")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"auto": "1"}', '{"auto": 1.0, "../x": 0.1}', '{"auto": 1.0, "fused": -1.0}', "[" * 20_000], ids=range(7))
def test_choice_is_measured_again_where_its_file_is_damaged(content: str, programs: Path, fast: Callable[..., None]) -> None:
    fast("blocks-32")
    choose_attention(SHAPE, programs, {})
    (file,) = programs.rglob("choice-*.json")
    file.write_text(content)
    fast("blocks-128")
    assert choose_attention(SHAPE, programs, {}).kernel == "blocks-128"
    assert json.loads(file.read_text())["blocks-128"] == 0.5


def test_choice_of_a_run_that_measures_at_the_same_time_is_taken(programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def other_run_is_first(shape: AttentionShape, kernels: list[str]) -> dict[str, float]:
        fast("blocks-32")
        choose_attention(shape, programs, {})
        return dict.fromkeys(kernels, 1.0) | {"blocks-128": 0.5}

    monkeypatch.setattr(attention_choice, "measure_kernels", other_run_is_first)
    assert choose_attention(SHAPE, programs, {}).kernel == "blocks-32"


def test_choice_names_why_there_is_no_fused_kernel(programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    fast("blocks-32")
    monkeypatch.setattr(library, "load_kernels", no_kernels)
    choice = choose_attention(SHAPE, programs, {})
    assert "fused" not in choice.reason.partition(";")[0] and choice.reason.endswith("; no fused kernel: no C++ compiler")


def test_short_run_has_the_default_kernel(make_run: Callable) -> None:
    state = make_run("pretrain", *HEADS_OF_16, "train.compile=off")
    assert kernels_of(state) == {"auto"} and "attention" not in run_summary(state)
    assert "environment.attention" not in state.compatibility


@pytest.mark.parametrize("stage", ["pretrain", "dpo"])
def test_kernel_of_a_long_run_is_recorded_and_repeated_by_a_resume_bitwise_equal(make_run: Callable, fast: Callable[..., None], stage: str) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    fast("blocks-32")
    whole = make_run(stage, *overrides, folder="whole")
    assert run_summary(whole)["attention"].startswith("blocks-32 (measured")
    assert [{layer.self_attn.attention_kernel for layer in model.layers} for model in (whole.model, *whole.objective.extra_models)] in (
        [{"blocks-32"}],
        [{"blocks-32"}] * 2,
    )
    train(whole)
    stopped = make_run(stage, *overrides, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    fast("blocks-128")  # a resume measures nothing
    resumed = make_run(stage, *overrides, folder="stopped", attempt=2)
    assert kernels_of(resumed) == {"blocks-32"} and run_summary(resumed)["attention"] == "blocks-32, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


def test_resume_without_the_kernel_of_its_checkpoint_is_not_exact_and_says_why(
    make_run: Callable, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    fast("blocks-32")
    state = make_run("pretrain", *overrides)
    state.compatibility["environment.attention"] = "fused"
    train(state)
    monkeypatch.setattr(library, "load_kernels", no_kernels)
    resumed = make_run("pretrain", *overrides, attempt=2)
    assert kernels_of(resumed) == {"auto"} and "not available, no C++ compiler" in run_summary(resumed)["attention"]
    assert "environment.attention" not in resumed.compatibility


@pytest.mark.parametrize("saved", ["fused-2", 7, None, ["fused"]], ids=str)
def test_unknown_kernel_of_a_checkpoint_is_the_default(saved: object, tmp_path: Path) -> None:
    assert attention_choice.repeat_choice(saved, SHAPE, tmp_path).kernel == "auto" in CPU_KERNELS


def no_product(dtype: object, head_width: int) -> None:
    raise KernelsUnavailableError("oneDNN has no matrix product of this type for this processor")


def test_kernels_that_load_on_a_processor_without_their_product_are_unavailable(
    programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an older processor, for which they are compiled again: a resume there takes the default, and another run does not take a choice from the file."""
    fast("blocks-32")
    monkeypatch.setattr(library, "load_kernels", lambda folder: None)
    monkeypatch.setattr(fused_attention, "check_product", no_product)
    choice = choose_attention(SHAPE, programs, {})
    assert choice.kernel == "blocks-32" and "oneDNN has no matrix product" in choice.reason and not choice.has_fused
    repeated = attention_choice.repeat_choice("fused", SHAPE, programs)
    assert repeated.kernel == "auto" and "oneDNN has no matrix product" in repeated.reason and not repeated.has_fused


@pytest.mark.parametrize(
    "ranks, kernel",
    [
        ([["fused", "", True], ["blocks-32", "", True]], "fused"),
        ([["fused", "", True], ["blocks-32", "", False]], "auto"),
        ([["blocks-32", "", False], ["fused", "", True]], "blocks-32"),
        ([["auto", "not available", False], ["fused", "", True]], "auto"),
    ],
)
def test_all_ranks_compute_the_kernel_of_the_first_if_all_have_it(ranks: list, kernel: str) -> None:
    choice = common_choice(ranks)
    assert choice.kernel == kernel and ("a rank has no fused kernel" in choice.reason) == (ranks[0][0] == "fused" != kernel)


def test_choice_that_another_run_has_read_is_not_replaced(programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for a file and the writing of one, another run may write and read it."""
    link = os.link

    def other_run_is_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        fast("blocks-32")
        assert choose_attention(SHAPE, programs, {}).kernel == "blocks-32"
        link(source, target)

    fast("blocks-128")
    monkeypatch.setattr(os, "link", other_run_is_first)
    assert choose_attention(SHAPE, programs, {}).kernel == "blocks-32"
