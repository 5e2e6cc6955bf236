"""Whether a long run compiles its layers: the faster of both ways, the same after a resume."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from fault_counts import only_full
from torch import nn

from common.errors import Interrupted
from runner.engine import kernels as kernels_of_run
from runner.engine.autotune import candidates
from runner.engine.autotune.candidates import COMPILED, UNCOMPILED, compiled_layers, find_layer_call, measure_layers
from runner.engine.device.compile import CompileDecision
from runner.engine.loop import train
from runner.engine.open_logs import run_summary
from runner.engine.verify_resume import diff_run_dirs

AUTO = ["train.compile=auto", "train.max_steps=4", "train.save_every=2"]
UNCOMPILED_RUN = ["train.compile=off", "train.max_steps=1"]
BOTH = [COMPILED, UNCOMPILED]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[str]]:
    """`measured(0.5)`: a layer that is not compiled takes that time, and a compiled one 1.0; returns what is measured.
    All runs are long.
    """
    monkeypatch.setattr(
        kernels_of_run,
        "resolve_compile_mode",
        lambda mode, *_: CompileDecision("default" if mode == "auto" else mode, "auto", is_long_run=True),
    )

    def measured(uncompiled: float) -> list[str]:
        modes = list[str]()

        def measure(call: object, compiled: object, names: list[str]) -> dict[str, float]:
            modes.extend(names)
            return {COMPILED: 1.0, UNCOMPILED: uncompiled}

        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"programs-{uncompiled}"))  # where times are kept
        monkeypatch.setattr(candidates, "measure_layers", measure)
        return modes

    return measured


def is_compiled(state) -> bool:
    return any(isinstance(vars(layer).get("forward"), partial) for layer in state.model.layers)


@pytest.mark.parametrize("uncompiled, mode", [(0.5, "off"), (0.95, "default")], ids=["slower", "little slower"])
def test_layers_are_not_compiled_where_that_is_clearly_slower(
    uncompiled: float, mode: str, make_run: Callable, measured: Callable
) -> None:
    modes = measured(uncompiled)
    state = make_run("pretrain", *AUTO)
    assert {*modes} == {*BOTH} and is_compiled(state) == (mode == "default")
    assert state.compile_decision.mode == state.compatibility["environment.compiled"] == mode
    kernel = COMPILED if mode == "default" else UNCOMPILED
    assert run_summary(state)["compile"].startswith(f"{kernel} (measured, ms a layer: compiled 1000.0")
    assert state.compatibility.get("environment.layers") == (None if kernel == COMPILED else kernel)


@pytest.mark.parametrize(
    "overrides", [["train.compile=default"], ["train.activation_checkpointing=full"]], ids=["set", "recomputed"]
)
def test_layers_are_not_measured_where_settings_decide(
    overrides: list[str], make_run: Callable, measured: Callable
) -> None:
    modes = measured(0.5)
    assert is_compiled(make_run("pretrain", *AUTO, *overrides)) and not modes


@pytest.mark.slow
def test_resume_stays_uncompiled_bitwise_equal(make_run: Callable, measured: Callable) -> None:
    measured(0.5)
    whole = make_run("sft", *AUTO, folder="whole")
    train(whole)
    stopped = make_run("sft", *AUTO, folder="stopped")
    with pytest.raises(Interrupted):
        train(stopped, stop_requested=lambda: stopped.progress.step == 2)
    modes = measured(2.0)
    resumed = make_run("sft", *AUTO, folder="stopped", attempt=2)
    assert not modes and not is_compiled(resumed) and run_summary(resumed)["compile"] == "uncompiled, as its checkpoint"
    train(resumed)
    for state in (whole, resumed):
        state.logger.finish("completed", {})
    assert diff_run_dirs(whole.run_dir, resumed.run_dir) == []


@only_full
@pytest.mark.slow(long=True)
def test_run_that_has_measured_has_the_bits_of_one_that_has_not(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was compiled to measure is not left in the process: in CI,
    test_compiled_programs_do_not_stay_in_the_process.
    """
    settings = [
        "data.packing=best_fit",
        "precision=bf16",
        "train.batch_size=1",
        "model.dropout=0.1",
        "model.num_hidden_layers=1",
    ]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setattr(
        candidates,
        "measure_layers",
        lambda *arguments: measure_layers(*arguments) | {UNCOMPILED: 2.0, COMPILED: 1.0},
    )
    measuring = make_run("sft", *AUTO, *settings, folder="measuring")
    assert is_compiled(measuring) and "measured" in run_summary(measuring)["compile"]
    train(measuring)
    torch._dynamo.reset()  # as in another process
    monkeypatch.setattr(candidates, "measure_layers", lambda *_: pytest.fail("measured again"))
    knowing = make_run("sft", *AUTO, *settings, folder="knowing")
    train(knowing)
    for state in (measuring, knowing):
        state.logger.finish("completed", {})
    assert diff_run_dirs(measuring.run_dir, knowing.run_dir) == []


def call_of(state, layer: nn.Module):
    return find_layer_call(layer, lambda: state.model(**state.loader.first_batch().inputs), nullcontext)


def test_first_layer_is_called_with_the_input_of_the_first_batch(make_run: Callable) -> None:
    state = make_run("pretrain", *UNCOMPILED_RUN, "train.batch_size=2", "model.dropout=0.1")
    before = torch.get_rng_state()
    call = call_of(state, state.model.layers[0])
    batch = state.loader.first_batch().input_ids
    assert (
        call.args[0].shape == (*batch.shape, state.cfg.model.hidden_size)
        and call.args[0].requires_grad
        and call.args[0].is_leaf
    )
    assert torch.equal(batch, next(iter(state.loader.iter_epoch(0)))[0].input_ids)
    assert torch.equal(before, torch.get_rng_state())
    state.model(batch)  # no hook is left


def test_layer_whose_input_is_tokens_is_not_measured(make_run: Callable) -> None:
    state = make_run("pretrain", *UNCOMPILED_RUN)
    assert call_of(state, state.model.model.embed_tokens) is None
    assert find_layer_call(nn.Linear(1, 1), lambda: None, nullcontext) is None  # never called


@pytest.mark.slow
def test_both_ways_are_measured_and_no_layer_stays_compiled(make_run: Callable) -> None:
    state = make_run("pretrain", *UNCOMPILED_RUN, "train.batch_size=2")
    compiled_calls = []

    def backend(graph, inputs):
        return lambda *values: compiled_calls.append(1) or graph(*values)

    compiled = partial(
        compiled_layers,
        partial(state.model.compile_layers, single_row=False, backend=backend),
        state.model.uncompile_layers,
    )
    times = measure_layers(call_of(state, state.model.layers[0]), compiled, BOTH)
    assert set(times) == {*BOTH} and all(seconds > 0 for seconds in times.values())
    assert len(compiled_calls) > 2 and not is_compiled(state) and all(p.grad is None for p in state.model.parameters())


@pytest.mark.slow
def test_uncompiled_layer_is_timed_without_its_program(make_run: Callable) -> None:
    state = make_run("pretrain", *UNCOMPILED_RUN, "train.batch_size=2")
    call, calls = call_of(state, state.model.layers[0]), []
    compile_layers = partial(
        state.model.compile_layers,
        single_row=False,
        backend=lambda graph, _: lambda *values: calls.append(1) or graph(*values),
    )
    for mode, is_called in ((UNCOMPILED, False), (COMPILED, True)):
        measure_layers(call, partial(compiled_layers, compile_layers, state.model.uncompile_layers), [mode])
        assert bool(calls) == is_called


@pytest.mark.parametrize(
    "override", ["model.dropout=0.1", "model.attention=flash", "train.batch_size=2", "data.max_length=32"]
)
def test_times_are_kept_for_the_settings_of_the_layer_and_its_input(
    override: str, make_run: Callable, measured: Callable
) -> None:
    modes = measured(0.5)
    for folder, overrides in (("first", []), ("same", []), ("other", [override])):
        make_run(
            "pretrain",
            *AUTO,
            "data.packing=best_fit",
            "data.max_length=64",
            "train.batch_size=1",
            *overrides,
            folder=folder,
        )
    assert len(modes) == 8  # two settings, each confirmed


def test_short_run_that_is_continued_as_a_long_one_is_compiled(
    make_run: Callable, measured: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resume is not exact, which it says: train.compile=off keeps it so."""
    modes = measured(0.5)
    with monkeypatch.context() as short:
        short.setattr(
            kernels_of_run, "resolve_compile_mode", lambda *_: CompileDecision("off", "off (auto: too short)")
        )
        train(make_run("pretrain", *AUTO))
    resumed = make_run("pretrain", "train.compile=auto", "train.max_steps=6", "train.save_every=2", attempt=2)
    assert is_compiled(resumed) and not modes and resumed.compatibility["environment.compiled"] == "default"


@pytest.mark.slow
def test_compiled_programs_do_not_stay_in_the_process(make_run: Callable) -> None:
    def backend(graph, inputs):
        programs.append(graph)
        return graph

    programs: list[object] = []
    state = make_run("pretrain", *UNCOMPILED_RUN, "train.batch_size=2")
    compiled = partial(
        compiled_layers,
        partial(state.model.compile_layers, single_row=False, backend=backend),
        state.model.uncompile_layers,
    )
    for _ in range(2):
        measure_layers(call_of(state, state.model.layers[0]), compiled, [COMPILED])
    assert len(programs) == 2


def test_compiler_that_fails_leaves_the_choice_to_the_settings(
    make_run: Callable, monkeypatch: pytest.MonkeyPatch, measured: Callable
) -> None:
    """The first step reports it; nothing is kept for later runs."""
    from torch._inductor.exc import CppCompileError

    def fail(*_: object) -> None:
        raise CppCompileError(["g++", "-O3"], "main.cpp:7:3: error: killed")

    modes = measured(0.5)
    with monkeypatch.context() as failing:
        failing.setattr(candidates, "measure_layers", measure_layers)
        failing.setattr(candidates.LayerCall, "compute", fail)
        state = make_run("pretrain", *AUTO, folder="failing")
        assert (
            is_compiled(state)
            and "compiled (not measured: torch.compile failed: main.cpp:7:3: error: killed;"
            in run_summary(state)["compile"]
        )
    assert not is_compiled(make_run("pretrain", *AUTO)) and modes
