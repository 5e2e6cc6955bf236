"""Kernels on the CPU that a long run chooses: by measuring, kept for later ones, the same after a resume and on every
rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from common.errors import Interrupted, StopRequested
from models.layers.attention import CPU_KERNELS
from models.layers.cpu_kernels import fused_attention, library
from models.layers.cpu_kernels.library import KernelsUnavailableError
from runner.engine import kernels as kernels_of_run
from runner.engine.build import run_summary
from runner.engine.choices import layer_choices, measured_choice
from runner.engine.choices.layer_choices import OTHER_KERNELS, AttentionShape, measure_attention
from runner.engine.choices.measured_choice import (
    ChosenKernel,
    KernelChoice,
    agree_on_kernel,
    cached_kernel,
    kernel_of_checkpoint,
    measured_kernel,
    shortest_times,
)
from runner.engine.device.compile import CompileDecision
from runner.engine.device.stop import StopRequests, as_stop_requests
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
        monkeypatch.setattr(
            layer_choices, "measure_attention", lambda shape, kernels: dict.fromkeys(kernels, 1.0) | {kernel: seconds}
        )

    monkeypatch.setattr(
        kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=True)
    )
    return fast


def choose_attention(shape: AttentionShape, folder: Path, facts: dict) -> ChosenKernel:
    return measured_kernel(layer_choices.attention_choice(shape, lambda kernel: None), folder, facts)


def attention_among(**times: float) -> str:
    return measured_choice._fastest(layer_choices.attention_choice(SHAPE, lambda kernel: None), times)


def repeat_attention(saved: object, folder: Path) -> ChosenKernel:
    return kernel_of_checkpoint(layer_choices.attention_choice(SHAPE, lambda kernel: None), saved, folder)


def no_kernels(folder: Path) -> None:
    raise KernelsUnavailableError("no C++ compiler")


def kernels_of(state) -> set[str]:
    return {layer.self_attn.attention_kernel for layer in state.model.layers}


def test_kernels_are_measured_in_turns_and_all_compute_the_shape() -> None:
    times = measure_attention(SHAPE, ["auto", *(name for name in OTHER_KERNELS if name != "fused")])
    assert set(times) == {"auto", "blocks-32", "blocks-128"} and all(seconds > 0 for seconds in times.values())


def test_choice_is_the_fastest_kernel_if_it_is_clearly_faster_and_is_kept(
    programs: Path, fast: Callable[..., None]
) -> None:
    fast("blocks-32", 0.95)
    assert choose_attention(SHAPE, programs, {}).kernel == "auto"
    assert attention_among(auto=1.0, fused=0.99) == "fused"  # it needs less memory
    assert attention_among(auto=1.0, fused=1.01) == "auto"
    fast("blocks-32", 0.5)
    assert choose_attention(SHAPE, programs, {}).kernel == "auto"  # measured before
    assert choose_attention(SHAPE, programs, {"threads": 2}).kernel == "blocks-32"
    fast("blocks-128", 0.5)
    assert choose_attention(SHAPE, programs, {"threads": 2}).reason.startswith(
        "blocks-32 (measured, ms a layer: blocks-64 1000.0, blocks-32 500.0"
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"auto": "1"}',
        '{"auto": 1.0, "../x": 0.1}',
        '{"auto": 1.0, "fused": -1.0}',
        "[" * 20_000,
        '{"auto": Infinity}',
    ],
    ids=range(8),
)
def test_choice_is_measured_again_where_its_file_is_damaged(
    content: str, programs: Path, fast: Callable[..., None]
) -> None:
    fast("blocks-32")
    choose_attention(SHAPE, programs, {})
    (file,) = programs.rglob("choice-*.json")
    file.write_text(content)
    fast("blocks-128")
    assert choose_attention(SHAPE, programs, {}).kernel == "blocks-128"
    assert json.loads(file.read_text())["blocks-128"] == 0.5


def test_choice_of_a_run_that_measures_at_the_same_time_is_taken(
    programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_run_is_first(shape: AttentionShape, kernels: list[str]) -> dict[str, float]:
        fast("blocks-32")
        choose_attention(shape, programs, {})
        return dict.fromkeys(kernels, 1.0) | {"blocks-128": 0.5}

    monkeypatch.setattr(layer_choices, "measure_attention", other_run_is_first)
    assert choose_attention(SHAPE, programs, {}).kernel == "blocks-32"


def test_choice_names_why_there_is_no_fused_kernel(
    programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast("blocks-32")
    monkeypatch.setattr(library, "load_kernels", no_kernels)
    choice = choose_attention(SHAPE, programs, {})
    assert "fused" not in choice.reason.partition(";")[0] and choice.reason.endswith(
        "; no fused kernel: no C++ compiler"
    )


def test_short_run_has_the_default_kernel(make_run: Callable) -> None:
    state = make_run("pretrain", *HEADS_OF_16, "train.compile=off")
    assert kernels_of(state) == {"auto"} and "attention" not in run_summary(state)
    assert "environment.attention" not in state.compatibility


@pytest.mark.parametrize("stage", ["pretrain", "dpo"])
def test_kernel_of_a_long_run_is_repeated_by_a_resume_bitwise_equal(
    make_run: Callable, fast: Callable[..., None], stage: str
) -> None:
    overrides = [*HEADS_OF_16, "train.max_steps=4", "train.save_every=2"]
    fast("blocks-32")
    whole = make_run(stage, *overrides, folder="whole")
    assert run_summary(whole)["attention"].startswith("blocks-32 (measured")
    assert [
        {layer.self_attn.attention_kernel for layer in model.layers}
        for model in (whole.model, *whole.objective.extra_models)
    ] in (
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


def test_resume_without_the_kernel_of_its_checkpoint_is_inexact(
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
    assert repeat_attention(saved, tmp_path).kernel == "auto" in CPU_KERNELS


def no_product(dtype: object, head_width: int) -> None:
    raise KernelsUnavailableError("oneDNN has no matrix product of this type for this processor")


def test_kernels_on_a_processor_without_their_product_are_unavailable(
    programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an older processor, for which they are compiled again: a resume there takes the default, and another run
    does not take a choice from the file.
    """
    fast("blocks-32")
    monkeypatch.setattr(library, "load_kernels", lambda folder: None)
    monkeypatch.setattr(fused_attention, "check_product", no_product)
    choice = choose_attention(SHAPE, programs, {})
    assert (
        choice.kernel == "blocks-32"
        and "oneDNN has no matrix product" in choice.reason
        and "fused" not in choice.available
    )
    repeated = repeat_attention("fused", programs)
    assert (
        repeated.kernel == "auto"
        and "oneDNN has no matrix product" in repeated.reason
        and "fused" not in repeated.available
    )


ALL, PLAIN = ["auto", *OTHER_KERNELS], ["auto", "blocks-32"]


@pytest.mark.parametrize(
    "ranks, kernel",
    [
        ([["fused", "", ALL], ["blocks-32", "", ALL]], "fused"),
        ([["fused", "", ALL], ["blocks-32", "", PLAIN]], "auto"),
        ([["blocks-32", "", PLAIN], ["fused", "", ALL]], "blocks-32"),
        ([["auto", "not available", ["auto"]], ["fused", "", ALL]], "auto"),
    ],
)
def test_all_ranks_compute_the_kernel_of_the_first_if_all_have_it(ranks: list, kernel: str) -> None:
    choice = agree_on_kernel(layer_choices.attention_choice(SHAPE, lambda kernel: None), ranks)
    assert choice.kernel == kernel and ("a rank has no fused kernel" in choice.reason) == (
        ranks[0][0] == "fused" != kernel
    )


def test_choice_that_another_run_has_read_is_not_replaced(
    programs: Path, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
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


# fact, overrides, function that measures, kernel, another one, kernels that a run computes with, start of the line in
# the log
CHOICES = [
    ("orthogonalization", ["optimizer=muon"], "optim.orthogonalize.measure_orthogonalization", "fp32", "bf16-batched", lambda state: {state.optimizers.parts[0].orthogonalization},
     "fp32 (measured, ms an update: bf16 1000.0, bf16-batched 1000.0, fp32 500.0"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fact, overrides, measure, kernel, other, used, line", CHOICES, ids=[choice[0] for choice in CHOICES]
)
def test_choice_of_a_long_run_is_repeated_by_a_resume_bitwise_equal(
    make_run: Callable, fast: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    fact: str, overrides: list[str], measure: str, kernel: str, other: str, used: Callable, line: str,
) -> None:  # fmt: skip
    def fastest(kernel: str) -> None:
        monkeypatch.setattr(
            f"runner.engine.{measure}", lambda *arguments: dict.fromkeys(arguments[-1], 1.0) | {kernel: 0.5}
        )

    overrides = [*overrides, "train.max_steps=4", "train.save_every=2"]
    title = fact.replace("_", " ")
    fast("auto")
    fastest(kernel)
    whole = make_run("sft", *overrides, folder="whole")
    assert (used(whole), whole.compatibility[f"environment.{fact}"]) == ({kernel}, kernel)
    assert run_summary(whole)[title].startswith(line)
    train(whole)
    stopped = make_run("sft", *overrides, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    fastest(other)
    resumed = make_run("sft", *overrides, folder="stopped", attempt=2)
    assert used(resumed) == {kernel} and run_summary(resumed)[title] == f"{kernel}, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


def choice_between(times: list[dict[str, float]]) -> KernelChoice:
    """A choice whose measurements give these times, one after the other."""
    return KernelChoice(
        "fact",
        "a",
        ("b", "c"),
        {},
        lambda names: {name: seconds for name, seconds in times.pop(0).items() if name in names},
        lambda kernel: None,
    )


def test_kernel_is_chosen_only_if_it_is_the_fastest_twice(tmp_path: Path) -> None:
    """Other load has disturbed the first time of the default."""
    rounds = [{"a": 2.0, "b": 1.0, "c": 1.5}, {"a": 1.05, "b": 1.0}]
    assert measured_kernel(choice_between(rounds), tmp_path, {}).kernel == "a" and not rounds
    rounds = [{"a": 2.0, "b": 1.0, "c": 1.5}, {"a": 2.0, "b": 1.9}, {"a": 2.0, "c": 1.5}]
    assert measured_kernel(choice_between(rounds), tmp_path, {"other": 1}).kernel == "c" and not rounds


def test_measuring_stops_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(measured_choice.time, "perf_counter", lambda: float(next(clock)))  # each call takes a second
    runs = {name: partial(calls.append, name) for name in "ab"}
    # two of three turns
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0, "b": 1.0} and calls.count("b") == 4
    monkeypatch.setattr(measured_choice, "MAX_MEASURING_SECONDS", 5.0)
    calls.clear()
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0} and calls == ["a", "a"]
    monkeypatch.setattr(measured_choice, "MAX_MEASURING_SECONDS", 0.5)
    calls.clear()
    assert shortest_times(runs, turns=3, passes=1) == {"a": 1.0} and calls == ["a"]
    reason = measured_kernel(choice_between([{"a": 1.0}]), tmp_path, {}).reason
    assert reason == "a (measured, ms: a 1000.0; too slow to measure the others)"


def test_choice_is_kept_on_a_file_system_without_hard_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 2.0, "b": 1.0}]
    assert [measured_kernel(choice_between(rounds), tmp_path, {}).kernel for _ in range(2)] == ["b", "b"] and not rounds


def test_choice_is_the_default_where_measuring_has_no_memory_left(tmp_path: Path) -> None:
    def measure(names: object) -> dict[str, float]:
        raise RuntimeError(message)

    choice, message = (
        replace(choice_between([]), measure=measure),
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes",
    )
    assert measured_kernel(choice, tmp_path, {})[:2] == ("a", "a (not measured: out of memory)")
    message = "shapes do not match"
    with pytest.raises(RuntimeError, match=message):
        measured_kernel(choice, tmp_path, {})


def test_measuring_is_announced_once_and_not_where_times_are_known(
    make_run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels_of_run, "set_inductor_cache", lambda: tmp_path)
    decision, dist = CompileDecision("off", "auto", is_long_run=True), make_run("pretrain", "train.max_steps=1").dist

    def choose(*rounds: dict[str, float]) -> str:
        choices = [replace(choice_between([times]), workload={"number": i}) for i, times in enumerate(rounds)]
        kernels_of_run.choose_cpu_kernels(choices, decision, dist, None, as_stop_requests(lambda: False))
        return capsys.readouterr().err

    rounds = [{"a": 1.0}, {"a": 2.0}]
    assert choose(*rounds) == "measuring which kernels are fastest on this machine; the times are kept for later runs\n"
    assert choose(*rounds) == ""


def test_known_kernel_is_the_one_that_a_run_would_take(tmp_path: Path) -> None:
    """A short run has not measured what only long runs may take; kernels that this machine lacks may be several."""
    choice = replace(choice_between([{"a": 1.0, "b": 0.5}] * 2), long_only=("c",))
    assert cached_kernel(choice, tmp_path, {}) is None
    assert measured_kernel(choice.for_short_runs(), tmp_path, {}).kernel == "b"
    assert cached_kernel(choice.for_short_runs(), tmp_path, {}) == "b" and cached_kernel(choice, tmp_path, {}) is None

    def load(kernel: str, folder: Path) -> None:
        raise KernelsUnavailableError("no compiler")

    alone = replace(choice_between([{"a": 1.0}]), load=load)
    assert measured_kernel(alone, tmp_path, {}).kernel == cached_kernel(alone, tmp_path, {}) == "a"


def test_pipe_in_place_of_the_file_of_a_choice_is_no_choice(tmp_path: Path) -> None:
    choice = choice_between([{"a": 1.0}, {"a": 1.0}])
    file = measured_choice._times_file(choice, tmp_path, {}, ["a", "b", "c"])
    file.parent.mkdir()
    os.mkfifo(file)
    assert measured_kernel(choice, tmp_path, {}).kernel == "a"


def test_stop_before_the_first_step_ends_the_choices(make_run: Callable, fast: Callable[..., None]) -> None:
    fast("auto")
    requests: list[str] = []
    dist = make_run("pretrain", "train.max_steps=1").dist
    stop = StopRequests(lambda: bool(requests))
    choices = (
        KernelChoice(
            name, "a", ("b",), {}, lambda names: dict.fromkeys(names, 1.0), lambda kernel: requests.append(kernel)
        )
        for name in ("first", "second")
    )
    with pytest.raises(StopRequested):
        kernels_of_run.choose_cpu_kernels(choices, CompileDecision("off", "off", is_long_run=True), dist, None, stop)
    assert requests == ["a"]
