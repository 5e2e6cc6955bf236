"""Kernels on the CPU that a long run chooses: mostly by timing, kept for later ones, the same after a resume and on
every rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from common.errors import Interrupted, StopRequested
from models.layers.cpu_kernels import fused_attention, library
from models.layers.cpu_kernels.library import KernelsUnavailableError
from runner.engine import kernels as kernels_of_run
from runner.engine.autotune import kernel_choice
from runner.engine.autotune.candidates import attention_choice
from runner.engine.autotune.kernel_choice import (
    ChosenKernel,
    KernelChoice,
    agree_on_kernel,
    kernel_of_checkpoint,
    measured_kernel,
    shortest_times,
)
from runner.engine.device.compile import CompileDecision
from runner.engine.device.signals import StopRequests, as_stop_requests
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


def choice_between(times: list[dict[str, float]]) -> KernelChoice:
    """A choice whose measurements give these times, one after the other."""
    return KernelChoice(
        "fact",
        "a",
        ("b", "c"),
        apply=lambda kernel: None,
        measure=lambda names: {name: seconds for name, seconds in times.pop(0).items() if name in names},
    )


def choose(times: dict[str, float], facts: dict[str, int] | None = None) -> ChosenKernel:
    return measured_kernel(choice_between([times, times]), lambda: facts or {})


def choose_attention() -> ChosenKernel:
    return measured_kernel(attention_choice(torch.float32, 32, []), dict)


def no_kernels(folder: Path) -> None:
    raise KernelsUnavailableError("no C++ compiler")


def kernels_of(state) -> set[str]:
    return {layer.self_attn.attention_kernel for layer in state.model.layers}


B_FASTEST, C_FASTEST = {"a": 1.0, "b": 0.5, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.5}


def test_choice_is_the_fastest_kernel_if_it_is_clearly_faster_and_is_kept() -> None:
    assert choose({"a": 1.0, "b": 0.95, "c": 1.0}).kernel == "a"
    assert choose(B_FASTEST).kernel == "a"  # measured before
    assert choose(B_FASTEST, {"threads": 2}).kernel == "b"
    assert choose(C_FASTEST, {"threads": 2}).reason == "b (measured, ms a layer: a 1000.0, b 500.0, c 1000.0)"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"a": "1"}', '{"a": 1.0, "../x": 0.1}', '{"a": 1.0, "b": -1.0}', "[" * 20_000, '{"a": Infinity}'],
    ids=range(8),
)
def test_choice_is_measured_again_where_its_file_is_damaged(content: str, tmp_path: Path) -> None:
    choose(B_FASTEST)
    (file,) = tmp_path.rglob("choice-*.json")
    file.write_text(content)
    assert choose(C_FASTEST).kernel == "c"
    assert json.loads(file.read_text())["c"] == 0.5


def test_choice_of_a_run_that_measures_at_the_same_time_is_taken() -> None:
    def other_run_is_first(names: list[str]) -> dict[str, float]:
        choose(B_FASTEST)
        return C_FASTEST

    choice = replace(choice_between([]), measure=other_run_is_first)
    assert measured_kernel(choice, dict).kernel == "b"


def test_choice_names_why_there_is_no_fused_kernel(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load_kernels", no_kernels)
    assert choose_attention()[:2] == ("auto", "blocks of queries; no fused kernel: no C++ compiler")
    monkeypatch.setattr(library, "load_kernels", lambda folder: None)
    odd = measured_kernel(attention_choice(torch.float32, 24, []), dict)
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
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@pytest.mark.usefixtures("long_runs")
def test_resume_without_the_kernel_of_its_checkpoint_is_inexact(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    state = make_run("pretrain", *overrides)
    state.compatibility["environment.attention"] = "fused"
    train(state)
    monkeypatch.setattr(library, "load_kernels", no_kernels)
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
    monkeypatch.setattr(library, "load_kernels", lambda folder: None)
    monkeypatch.setattr(fused_attention, "check_product", no_product)
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
    choice = agree_on_kernel(choice_between([]), ranks)
    assert choice.kernel == kernel and ("a rank has no c kernel" in choice.reason) == (ranks[0][0] == "c" != kernel)


def test_choice_that_another_run_has_read_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for a file and the writing of one, another run may write and read it."""
    link = os.link

    def other_run_is_first(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        assert choose(B_FASTEST).kernel == "b"
        link(source, target)

    monkeypatch.setattr(os, "link", other_run_is_first)
    assert choose(C_FASTEST).kernel == "b"


def test_kernel_is_chosen_only_if_it_is_the_fastest_twice() -> None:
    """Other load has disturbed the first time of the default."""
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 1.05, "b": 1.0}]
    assert measured_kernel(choice_between(rounds), dict).kernel == "a" and not rounds
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 2.0, "b": 1.0}]
    assert measured_kernel(choice_between(rounds), lambda: {"other": 1}).kernel == "b" and not rounds


def test_measuring_stops_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(kernel_choice.time, "perf_counter", lambda: float(next(clock)))  # each call takes a second
    runs = {name: partial(calls.append, name) for name in "ab"}
    # two of three turns
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0, "b": 1.0} and calls.count("b") == 4
    monkeypatch.setattr(kernel_choice, "MAX_MEASURING_SECONDS", 5.0)
    calls.clear()
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0} and calls == ["a", "a"]
    monkeypatch.setattr(kernel_choice, "MAX_MEASURING_SECONDS", 0.5)
    calls.clear()
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0} and calls == ["a"]
    reason = measured_kernel(choice_between([{"a": 1.0}]), dict).reason
    assert reason == "a (measured, ms a layer: a 1000.0; too slow to measure the others)"


def test_choice_is_kept_on_a_file_system_without_hard_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 2.0, "b": 1.0}]
    assert [measured_kernel(choice_between(rounds), dict).kernel for _ in range(2)] == ["b", "b"] and not rounds


def test_choice_is_the_default_where_measuring_has_no_memory_left() -> None:
    def measure(names: object) -> dict[str, float]:
        raise RuntimeError(message)

    choice, message = (
        replace(choice_between([]), measure=measure),
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes",
    )
    assert measured_kernel(choice, dict)[:2] == ("a", "a (not measured: out of memory)")
    message = "shapes do not match"
    with pytest.raises(RuntimeError, match=message):
        measured_kernel(choice, dict)


def test_measuring_is_announced_unless_times_are_known(make_run: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    decision, dist = CompileDecision("off", "auto", is_long_run=True), make_run("pretrain", "train.max_steps=1").dist

    def choose() -> str:
        choices = [choice_between([{"a": 1.0}])]
        kernels_of_run.choose_cpu_kernels(choices, decision, dist, None, as_stop_requests(lambda: False))
        return capsys.readouterr().err

    text = "measuring whether compiled layers are faster on this machine; the times are kept for later runs\n"
    assert [choose(), choose()] == [text, ""]


def test_pipe_in_place_of_the_file_of_a_choice_is_no_choice() -> None:
    choice = choice_between([{"a": 1.0}, {"a": 1.0}])
    file = kernel_choice._times_file(choice, {}, ["a", "b", "c"])
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    assert measured_kernel(choice, dict).kernel == "a"


def test_stop_before_the_first_step_ends_the_choices(make_run: Callable) -> None:
    requests: list[str] = []
    dist = make_run("pretrain", "train.max_steps=1").dist
    stop = StopRequests(lambda: bool(requests))
    choices = (
        KernelChoice(name, "a", ("b",), apply=requests.append, measure=lambda names: dict.fromkeys(names, 1.0))
        for name in ("first", "second")
    )
    with pytest.raises(StopRequested):
        kernels_of_run.choose_cpu_kernels(choices, LONG_RUN, dist, None, stop)
    assert requests == ["a"]
