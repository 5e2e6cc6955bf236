"""Kernels on the CPU that a long run chooses, the same after a resume and on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.errors import Interrupted, StopRequested
from models.layers.cpu_kernels.library import KernelsUnavailableError
from runner.engine import kernel_choice
from runner.engine import kernels as kernels_of_run
from runner.engine.device.compile import CompileDecision
from runner.engine.device.signals import StopRequests
from runner.engine.kernel_choice import (
    ChosenKernel,
    KernelChoice,
    agree_on_kernel,
    attention_choice,
    best_kernel,
    kernel_of_checkpoint,
)
from runner.engine.loop import train
from runner.engine.open_logs import run_summary
from runner.engine.verify_resume import diff_run_dirs

HEADS_OF_16 = ["model.head_dim=16", "model.attention=auto"]
LONG_RUN = CompileDecision("off", "off", is_long_run=True)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of compiled programs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_of_run, "resolve_compile_mode", lambda *_: LONG_RUN)


def choice_of(*missing: str, fact: str = "fact", apply: Callable[[str], None] = lambda kernel: None) -> KernelChoice:
    """A choice of a, b, or c; the machine cannot compute those that are `missing`."""

    def load(kernel: str) -> None:
        if kernel in missing:
            raise KernelsUnavailableError(f"no compiler of {kernel}")

    return KernelChoice(fact, "a", ("b", "c"), apply=apply, labels={name: name for name in "abc"}, load=load)


def choose_attention() -> ChosenKernel:
    return best_kernel(attention_choice(torch.float32, 32, []))


def no_kernels(folder: Path) -> None:
    raise KernelsUnavailableError("no C++ compiler")


def kernels_of(state) -> set[str]:
    return {layer.self_attn.attention_kernel for layer in state.model.layers}


@pytest.mark.parametrize(
    "missing, chosen",
    [
        ("", ("c", "c", ("a", "b", "c"))),
        ("c", ("b", "b; no c kernel: no compiler of c", ("a", "b"))),
        ("bc", ("a", "a; no b kernel: no compiler of b; no c kernel: no compiler of c", ("a",))),
    ],
)
def test_choice_is_the_last_kernel_that_the_machine_computes(missing: str, chosen: tuple) -> None:
    assert best_kernel(choice_of(*missing)) == chosen


def test_choice_names_why_there_is_no_fused_kernel(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "load_kernels", no_kernels)
    assert choose_attention()[:2] == ("auto", "blocks of queries; no fused kernel: no C++ compiler")
    monkeypatch.setattr(kernel_choice, "load_kernels", lambda folder: None)
    odd = best_kernel(attention_choice(torch.float32, 24, []))
    assert odd.reason.endswith("no fused kernel: not for heads of 24 numbers in torch.float32")


def test_short_run_has_the_default_kernel(make_run: Callable) -> None:
    state = make_run("pretrain", *HEADS_OF_16, "train.compile=off")
    assert kernels_of(state) == {"auto"} and "attention" not in run_summary(state)
    assert "environment.attention" not in state.compatibility


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs", "kernels")
@pytest.mark.parametrize("stage", ["pretrain", "dpo"])
def test_kernel_of_a_long_run_is_repeated_by_a_resume_bitwise_equal(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    whole = make_run(stage, *overrides, folder="whole")
    assert run_summary(whole)["attention"] == "fused"
    for model in (whole.model, *whole.objective.extra_models):
        assert {layer.self_attn.attention_kernel for layer in model.layers} == {"fused"}
    train(whole)
    stopped = make_run(stage, *overrides, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    # a resume chooses nothing
    monkeypatch.setattr(kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off"))
    resumed = make_run(stage, *overrides, folder="stopped", attempt=2)
    assert kernels_of(resumed) == {"fused"} and run_summary(resumed)["attention"] == "fused, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed")
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@pytest.mark.usefixtures("long_runs", "kernels")
def test_resume_without_the_kernel_of_its_checkpoint_is_inexact(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    state = make_run("pretrain", *overrides)
    state.compatibility["environment.attention"] = "fused"
    train(state)
    monkeypatch.setattr(kernel_choice, "load_kernels", no_kernels)
    resumed = make_run("pretrain", *overrides, attempt=2)
    assert kernels_of(resumed) == {"auto"} and "not available, no C++ compiler" in run_summary(resumed)["attention"]
    assert "environment.attention" not in resumed.compatibility


@pytest.mark.parametrize("saved", ["fused-2", 7, None, ["fused"]], ids=str)
def test_unknown_kernel_of_a_checkpoint_is_the_default(saved: object) -> None:
    assert kernel_of_checkpoint(attention_choice(torch.float32, 32, []), saved).kernel == "auto"


def no_product(dtype: object, head_width: int) -> None:
    raise KernelsUnavailableError("oneDNN has no matrix product of this type for this processor")


def test_kernels_on_a_processor_without_their_product_are_unavailable(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an older processor, for which they are compiled again: a run and a resume there take the default."""
    monkeypatch.setattr(kernel_choice, "load_kernels", lambda folder: None)
    monkeypatch.setattr(kernel_choice, "check_product", no_product)
    repeated = kernel_of_checkpoint(attention_choice(torch.float32, 32, []), "fused")
    for choice in (choose_attention(), repeated):
        assert (choice.kernel, choice.available) == ("auto", ("auto",))
        assert "oneDNN has no matrix product" in choice.reason


ALL, PLAIN = ["a", "b", "c"], ["a", "b"]


@pytest.mark.parametrize(
    "ranks, kernel",
    [
        ([["c", "", ALL], ["b", "", ALL]], "c"),
        ([["c", "", ALL], ["b", "", PLAIN]], "a"),
        ([["b", "", PLAIN], ["c", "", ALL]], "b"),
        ([["a", "not available", ["a"]], ["c", "", ALL]], "a"),
    ],
)
def test_all_ranks_compute_the_kernel_of_the_first_if_all_have_it(ranks: list, kernel: str) -> None:
    choice = agree_on_kernel(choice_of(), ranks)
    assert choice.kernel == kernel and ("a rank has no c kernel" in choice.reason) == (ranks[0][0] == "c" != kernel)


def test_stop_before_the_first_step_ends_the_choices(make_run: Callable) -> None:
    requests: list[str] = []
    dist = make_run("pretrain", "train.max_steps=1").dist
    stop = StopRequests(lambda: bool(requests))
    choices = (choice_of(fact=name, apply=requests.append) for name in ("first", "second"))
    with pytest.raises(StopRequested):
        kernels_of_run.choose_cpu_kernels(choices, dist, None, stop)
    assert requests == ["c"]
