"""plan.py: sizes that are exact, activations that autograd really saves, alternatives by the same formula, and pages
that fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from engine_fixtures import require_product
from fault_counts import only_full

from common.errors import UserError
from data.tokenize.block import RowStats, measure_truncation
from models.language_model import create_model
from models.lora import add_lora
from runner.config.compose import compose_config
from runner.engine.config import Config
from runner.engine.device import cpu
from runner.engine.optim.groups import build_optimizer
from runner.planning import memory
from runner.planning.alternatives import find_alternatives, with_train
from runner.planning.command import Planner, notes_of, timed_settings
from runner.planning.estimate import RunPlan, bytes_text, estimate_disk, plan_dict, plan_text, short_count, sweep_text
from runner.planning.facts import BatchShape, DataFacts, model_facts
from runner.planning.memory import (
    COMPILER,
    CPU_LIBRARIES,
    FP32,
    Execution,
    MemoryEstimate,
    estimate_memory,
    layer_memory,
    plan_execution,
)
from runner.planning.planned_settings import fitting_batch
from runner.planning.starts import planned_start
from runner.planning.trial import remove_leftovers

TINY = ["device=cpu", "init_from=scratch", "train.max_steps=4"]
SMALL_MOE = [
    "model=minimind_moe",
    "model.hidden_size=32",
    "model.head_dim=8",
    "model.moe_intermediate_size=48",
    "model.num_hidden_layers=2",
]


@pytest.fixture(scope="module")
def tiny_plan() -> RunPlan:
    return Planner().plan(planned_start([*TINY, "train.batch_size=4"], {}).runs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], ["stage=lora"], ["stage=dpo"], SMALL_MOE], ids=["pretrain", "lora", "dpo", "moe"]
)
def test_model_facts_are_those_of_the_model_and_of_its_optimizer(overrides: list[str]):
    cfg = compose_config([*TINY, *overrides])
    facts, model = model_facts(cfg), create_model(cfg.model)
    if cfg.stage.lora is not None:
        add_lora(model, cfg.stage.lora)
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert facts.reference == (facts.parameters if cfg.stage.needs_reference else 0)
    optimizers = build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizers.step(torch.zeros(()))
    assert facts.optimizer_numbers(cfg) == sum(
        tensor.numel() for tensor in optimizers.state_dict().values() if tensor.ndim
    )


def test_active_parameters_of_a_mixture_are_those_of_the_chosen_experts():
    cfg = compose_config([*TINY, *SMALL_MOE, "model.num_experts=4", "model.num_experts_per_tok=1"])
    dense = compose_config([*TINY, *SMALL_MOE, "model.num_experts=1", "model.num_experts_per_tok=1"])
    routers = 3 * cfg.model.num_hidden_layers * 32
    assert model_facts(cfg).active == model_facts(dense).parameters + routers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "packed"),
    [
        (["precision=fp32"], False),
        (["precision=bf16"], True),
        (["stage=lora", "precision=fp32"], True),
        (["stage=lora", "precision=bf16"], False),
        ([*SMALL_MOE, "precision=fp32"], True),
    ],
    ids=["fp32", "bf16", "lora", "lora_bf16", "moe"],
)
def test_formula_counts_the_tensors_that_autograd_saves_in_a_layer(overrides: list[str], packed: bool):
    cfg = compose_config([*TINY, *overrides])
    layer = layer_memory(cfg, model_facts(cfg), BatchShape(4, 64, packed), Execution(on_cpu=True))
    assert layer.saved() == pytest.approx(saved_by_a_layer(cfg, packed), rel=0.03)


# divides a graph as inductor does, and compiles no code: that takes two minutes of processor time
GRAPHS = "aot_eager_decomp_partition"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        (["precision=fp32"], None),
        (["precision=bf16"], None),
        ([*SMALL_MOE, "model.head_dim=16", "precision=bf16"], None),
        pytest.param(["precision=fp32"], GRAPHS, marks=[pytest.mark.slow, only_full]),
        pytest.param(["precision=bf16"], GRAPHS, marks=pytest.mark.slow),
        pytest.param(["stage=lora", "precision=bf16"], "inductor", marks=[pytest.mark.slow, only_full]),
    ],
    ids=["fp32", "bf16", "moe_bf16", "fp32_compiled", "bf16_compiled", "lora_bf16_compiled"],
)
def test_formula_counts_the_tensors_that_the_kernels_of_long_runs_save(overrides: list[str], compiled: str | None):
    require_product(torch.bfloat16 if "precision=bf16" in overrides else torch.float32)
    cfg = compose_config([*TINY, *overrides])
    saved = saved_by_a_layer(cfg, True, kernel="fused", compiled=compiled)
    execution = Execution(on_cpu=True, is_compiled=compiled is not None, has_kernels=True)
    layer = layer_memory(cfg, model_facts(cfg), BatchShape(4, 64, True), execution)
    assert layer.saved() == pytest.approx(saved, rel=0.08)  # the tokens of an expert are padded


def saved_by_a_layer(cfg: Config, packed: bool, kernel: str = "auto", compiled: str | None = None) -> int:
    """Return the bytes that autograd saves in a forward pass of 4 x 64 tokens for the second of two layers; `compiled`:
    the backend of torch.compile.
    """
    torch.manual_seed(0)  # which experts the tokens are routed to
    model = create_model(dataclasses.replace(cfg.model, num_hidden_layers=2))
    if cfg.stage.lora is not None:
        add_lora(model, cfg.stage.lora)
    model.activation_checkpointing = "none"
    model.use_attention_kernel(kernel)
    if compiled:
        model.compile_layers(single_row=False, backend=compiled)
    of_two = saved_bytes(model, packed, cfg.precision.name == "bf16")
    model.model.layers = model.model.layers[:1]  # compiled once: one program serves all layers
    return of_two - saved_bytes(model, packed, cfg.precision.name == "bf16")


def saved_bytes(model: torch.nn.Module, packed: bool, is_bf16: bool) -> int:
    """Return the bytes of the distinct storages that autograd saves, without those of parameters."""
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (4, 64))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # its storage must not be used again
        return tensor

    documents = (
        {"document_ids": torch.zeros(4, 64, dtype=torch.long), "position_ids": torch.arange(64).expand(4, 64)}
        if packed
        else {}
    )
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", enabled=is_bf16),
    ):
        model.train()(ids, labels=ids, lengths=torch.full((1 if packed else 4,), 64), reduction="sum", **documents)
    return sum(sizes.values())


@pytest.mark.slow
def test_every_part_of_the_memory_grows_with_what_it_holds(tiny_plan: RunPlan):
    parts = tiny_plan.memory.parts
    assert parts["weights"] == FP32 * tiny_plan.model.parameters
    assert parts["optimizer"] == FP32 * tiny_plan.model.optimizer_numbers(tiny_plan.run.config)
    larger = Planner().plan(planned_start([*TINY, "train.batch_size=8"], {}).runs[0])
    assert larger.data.shape.numbers == 2 * tiny_plan.data.shape.numbers
    assert larger.memory.parts["activations"] == pytest.approx(2 * parts["activations"], rel=0.1)
    assert larger.memory.parts["weights"] == parts["weights"]


def estimated(plan: RunPlan, cfg: Config, steps: int = 4, device: str = "cpu", **shape: int) -> MemoryEstimate:
    """The memory of a run of other settings and another micro-batch, without the process."""
    data = dataclasses.replace(plan.data, steps=steps, shape=dataclasses.replace(plan.data.shape, **shape))
    return estimate_memory(cfg, plan.model, data, dataclasses.replace(plan.machine, device=device), 1, 0)


@pytest.mark.parametrize(
    ("settings", "steps", "copies"),
    [
        ({"eval_every": 100, "save_every": 100}, 300, 1),
        ({"eval_every": 100, "save_every": 50}, 300, 1),
        ({"eval_every": 100, "save_every": 200}, 300, 2),
        ({"eval_every": 100, "save_every": 200}, 100, 1),  # only the last step is evaluated, and it is saved
        ({"eval_every": 100, "save_every": 0}, 100, 2),  # saved at the end, after that evaluation
        ({"eval_every": 0, "save_every": 0, "final_eval_rows": 8}, 100, 2),
        ({"eval_every": 0, "save_every": 0, "final_eval_rows": 0}, 100, 1),
    ],
)
def test_save_counts_a_copy_of_the_best_weights_only_if_not_saved(
    tiny_plan: RunPlan, settings: dict[str, int], steps: int, copies: int
) -> None:
    cfg, facts = with_train(tiny_plan.run.config, **settings), tiny_plan.model
    parts = estimated(tiny_plan, cfg, steps, rows=1, tokens=8).parts
    assert parts["checkpoint copy"] == FP32 * (copies * facts.trained + facts.optimizer_numbers(cfg))


def test_step_after_a_save_needs_the_copies_that_are_written_too(tiny_plan: RunPlan) -> None:
    cfg, facts = with_train(tiny_plan.run.config, eval_every=2, save_every=2), tiny_plan.model
    at_end, between = (estimated(tiny_plan, cfg, steps) for steps in (2, 3))
    copies = FP32 * (facts.trained + facts.optimizer_numbers(cfg))
    assert (
        between.moment == f"{at_end.moment}, while a checkpoint is written" and between.total == at_end.total + copies
    )
    # they are in host memory
    assert estimated(tiny_plan, cfg, 3, "cuda").total == estimated(tiny_plan, cfg, 2, "cuda").total


@pytest.mark.parametrize("size", [8, 24, 80])
def test_experiment_of_a_gpu_fits_into_its_memory_and_uses_a_third_of_it(tiny_plan: RunPlan, size: int) -> None:
    cfg = compose_config([f"experiment=gpu_{size}gb"])
    shape = BatchShape(cfg.train.batch_size, cfg.data.max_length, True)
    data = dataclasses.replace(tiny_plan.data, shape=shape, micro_batches=cfg.train.accumulation_steps)
    machine = dataclasses.replace(tiny_plan.machine, device="cuda")
    needed = estimate_memory(cfg, model_facts(cfg), data, machine, 1, 0).total
    assert size / 3 < needed / 10**9 < 0.9 * size


@pytest.mark.parametrize(("rows", "tokens", "per_pair"), [(4, 512, FP32), (16, 2048, FP32), (1, 32768, 0)])
def test_mask_of_packed_rows_on_a_gpu_is_counted_once(
    tiny_plan: RunPlan, rows: int, tokens: int, per_pair: int
) -> None:
    """All layers share it; FlexAttention, which computes long rows, has none."""
    packed, plain = (
        estimated(tiny_plan, tiny_plan.run.config, 4, "cuda", rows=rows, tokens=tokens, is_packed=is_packed)
        for is_packed in (True, False)
    )
    assert packed.parts["activations"] - plain.parts["activations"] == per_pair * rows * tokens**2


def test_long_runs_are_compiled_and_have_a_pool_by_the_rules_of_the_engine(
    tiny_plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 steps are short, a million are long."""
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(memory, "cpp_compiler", lambda: ["g++"])
    monkeypatch.setattr("runner.engine.device.compile.cpp_compiler", lambda: ["g++"])
    monkeypatch.setattr("models.layers.cpu_kernels.library.is_supported_machine", lambda: True)
    facts, data = tiny_plan.model, dataclasses.replace(tiny_plan.data, steps=1_000_000)
    cfg = compose_config([*TINY, "model.head_dim=16", "precision=fp32"])
    heads_of_16 = dataclasses.replace(facts, layer=dataclasses.replace(facts.layer, queries=16 * facts.layer.heads))

    def execution(data: DataFacts) -> Execution:
        return plan_execution(cfg, heads_of_16, data, tiny_plan.machine, 1)

    long = execution(data)
    assert execution(tiny_plan.data) == Execution(on_cpu=True, threads=long.threads)
    assert (long.is_compiled, long.has_pool, long.has_kernels) == (True, sys.platform == "linux", True)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not execution(data).has_pool
    monkeypatch.setattr(memory, "cpp_compiler", lambda: [])
    assert not execution(data).has_kernels


def test_long_run_counts_few_holes_no_probabilities_and_the_compiler(
    tiny_plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(execution: Execution) -> dict[str, int]:
        monkeypatch.setattr(memory, "plan_execution", lambda *args: execution)
        cfg = with_train(tiny_plan.run.config, save_every=0)
        return dict(estimated(tiny_plan, cfg, rows=16, tokens=256).parts)

    plain, fused = parts(Execution(True)), parts(Execution(True, has_kernels=True, threads=2))
    layers, heads = tiny_plan.model.layer.layers, tiny_plan.model.layer.heads
    assert plain["activations"] - fused["activations"] > layers * 16 * heads * 256 * 256 // 2 * FP32
    one_thread = parts(Execution(True, has_kernels=True))["attention buffers"]
    assert "attention buffers" not in plain and fused["attention buffers"] == 2 * one_thread
    pooled = parts(Execution(True, has_pool=True))
    assert 0 < pooled["allocator"] < 0.04 * pooled["activations"] < plain["allocator"]
    compiled = parts(Execution(True, is_compiled=True))
    assert (
        compiled["compiler"] == COMPILER and "compiler" not in plain and compiled["activations"] < plain["activations"]
    )


def test_attention_buffers_of_a_long_document_are_those_that_were_measured() -> None:
    """8 query heads on 2 key heads of 64, bf16, 32,768 tokens, 2 threads: VmHWM grows by 120 MiB in the backward pass,
    after 16 in the forward pass.
    """
    heads = ["model.num_attention_heads=8", "model.num_key_value_heads=2", "model.head_dim=64", "precision=bf16"]
    cfg = compose_config([*TINY, *heads])
    model, shape = model_facts(cfg), BatchShape(1, 32_768, is_packed=True)
    fused, plain = Execution(True, has_kernels=True, threads=2), Execution(True, threads=2)
    assert layer_memory(cfg, model, shape, fused).attention_buffers() == 136 << 20
    assert layer_memory(cfg, model, shape, plain).attention_buffers() == 0


def test_plan_says_that_what_a_run_without_the_kernels_saves(tiny_plan: RunPlan) -> None:
    execution = Execution(True, has_kernels=True)
    long = dataclasses.replace(tiny_plan, memory=dataclasses.replace(tiny_plan.memory, execution=execution))
    assert any("C++ attention" in note for note in notes_of(long))
    assert not any("C++ attention" in note for note in notes_of(tiny_plan))


def test_steps_rows_and_tokens_are_those_of_the_run(tiny_plan: RunPlan):
    data = tiny_plan.data
    assert (data.steps, data.micro_batches, data.sequences_per_step) == (4, 1, 4)
    epochs = (
        Planner()
        .plan(
            planned_start([*TINY[:2], "train.batch_size=4", "train.epochs=2", "train.accumulation_steps=3"], {}).runs[0]
        )
        .data
    )
    assert epochs.micro_batches == 3 and epochs.run_tokens == 2 * epochs.tokens
    assert epochs.steps == 2 * epochs.steps_per_epoch == 2 * -(-epochs.sequences // 12)


def test_run_that_does_not_fit_gets_overrides_of_the_same_formula(tiny_plan: RunPlan):
    machine = dataclasses.replace(tiny_plan.machine, memory=tiny_plan.memory.total - (8 << 20))
    plan = dataclasses.replace(tiny_plan, machine=machine)
    process = plan.memory.parts["process and data"] - CPU_LIBRARIES
    plan.alternatives = find_alternatives(plan.run.config, plan.model, plan.data, machine, 1, process)
    by_override = {alternative.overrides: alternative for alternative in plan.alternatives}
    halved = by_override["train.batch_size=2 train.accumulation_steps=2"]
    assert halved.fits and halved.memory < plan.memory.total
    again = Planner().plan(planned_start([*TINY, *halved.overrides.split()], {}).runs[0])
    assert again.memory.total - again.memory.parts["process and data"] == halved.memory - process - CPU_LIBRARIES
    assert {"precision=bf16", "train.activation_checkpointing=full"} <= by_override.keys()
    text = plan_text(plan)
    assert "does not fit" in text and halved.overrides.split()[0] in text


def test_odd_micro_batch_that_does_not_fit_gets_a_smaller_one(
    tiny_plan: RunPlan,
):
    machine, process = dataclasses.replace(tiny_plan.machine, memory=0), 0
    for size, accumulation, expected in (
        (7, 4, {(2, 14): "", (1, 28): ""}),
        (13, 1, {(7, 2): "14 rows per step instead of 13", (1, 13): ""}),
        (1, 3, {}),
    ):
        cfg = with_train(tiny_plan.run.config, batch_size=size, accumulation_steps=accumulation)
        found = find_alternatives(cfg, tiny_plan.model, tiny_plan.data, machine, 1, process)
        proposed = {
            alternative.overrides: alternative for alternative in found if alternative.overrides.count(" ") == 1
        }
        assert {overrides: alternative.changes for overrides, alternative in proposed.items()} == {
            f"train.batch_size={rows} train.accumulation_steps={steps}": changes
            for (rows, steps), changes in expected.items()
        }
        plan = dataclasses.replace(tiny_plan, machine=machine, alternatives=found)
        shown = " ".join(plan_text(plan).split())
        assert all(
            not changes or f"{overrides} ({changes})" in shown
            for overrides, changes in ((o, a.changes) for o, a in proposed.items())
        )


def test_alternatives_share_memory_among_the_ranks_of_all_machines(tiny_plan: RunPlan):
    cfg = dataclasses.replace(
        tiny_plan.run.config,
        distributed=dataclasses.replace(tiny_plan.run.config.distributed, name="fsdp", nproc="2", nnodes=3),
    )
    machine = dataclasses.replace(tiny_plan.machine, memory=0)
    found = {each.overrides: each for each in find_alternatives(cfg, tiny_plan.model, tiny_plan.data, machine, 2, 0)}
    checkpointed = with_train(cfg, activation_checkpointing="full")
    expected = estimate_memory(checkpointed, tiny_plan.model, tiny_plan.data, machine, 2, 0)
    assert expected.parts["weights"] == FP32 * tiny_plan.model.parameters // 6
    assert found["train.activation_checkpointing=full"].memory == expected.total * 2  # both ranks of this machine


def test_plan_fits_80_columns_and_json_has_every_part(tiny_plan: RunPlan):
    plan = dataclasses.replace(tiny_plan, notes=["a note " * 30])
    plan.run = dataclasses.replace(plan.run, name="optimizer.lr=1e-4 " * 20)
    assert max(map(len, plan_text(plan).splitlines())) <= 80
    values = json.loads(json.dumps(plan_dict(plan)))
    assert (
        sum(values["memory"]["parts"].values()) == values["memory"]["total"]
        and values["fits"]
        and values["time"] is None
    )


def test_jobs_whose_time_depends_on_a_setting_share_no_trial():
    cfg = compose_config(TINY)
    assert timed_settings(dataclasses.replace(cfg, seed=2)) == timed_settings(cfg)
    for settings in (
        {"final_eval_rows": 7},
        {"sample_prompts": ["a", "b"]},
        {"sample_tokens": 3},
        {"batch_size": 2},
        {"save_every": 7},
    ):
        assert timed_settings(with_train(cfg, **settings)) != timed_settings(cfg)
    assert timed_settings(
        dataclasses.replace(cfg, distributed=dataclasses.replace(cfg.distributed, name="ddp"))
    ) != timed_settings(cfg)


def test_jobs_that_are_computed_in_other_ways_share_no_trial(
    tiny_plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[Config] = []
    monkeypatch.setattr("runner.planning.command.trial_of", lambda cfg: trials.append(cfg) or {"peak_bytes": 0})
    monkeypatch.setattr("runner.planning.estimate.RunPlan.fits_memory", True)
    machine = dataclasses.replace(tiny_plan.machine, available=1 << 50)
    Planner().time(
        [
            dataclasses.replace(
                tiny_plan, machine=machine, memory=dataclasses.replace(tiny_plan.memory, execution=each)
            )
            for each in (Execution(True), Execution(True), Execution(True, is_compiled=True))
        ]
    )
    assert len(trials) == 2


def test_plan_counts_in_the_singular(tiny_plan: RunPlan):
    one = dataclasses.replace(
        tiny_plan,
        data=dataclasses.replace(tiny_plan.data, micro_batches=1),
        disk=dataclasses.replace(tiny_plan.disk, checkpoints=1),
    )
    assert (
        " in 1 micro-batch" in plan_text(one)
        and "1 micro-batches" not in plan_text(one)
        and "1 checkpoint of" in plan_text(one)
    )


@pytest.mark.slow
def test_sweep_plans_every_point_with_the_settings_that_it_derives():
    start = planned_start([*TINY, "train.batch_size=2,4"], {"--multirun": True})
    planner = Planner()
    plans = [planner.plan(run) for run in start.runs]
    assert [plan.data.steps for plan in plans] == [4, 2]  # the same tokens
    assert {"train.batch_size=4", "train.max_steps=2"} <= set(plans[1].run.overrides)
    text = sweep_text(plans, start.trials)
    assert "total of 2 jobs" in text and max(map(len, text.splitlines())) <= 80
    assert plans[0].model is plans[1].model  # built once


@pytest.mark.slow
def test_plan_of_a_study_counts_all_its_trials(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("optuna")
    study = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "train.batch_size=2,4", "sweep.match_budget=steps"]
    start = planned_start([*TINY, *study], {"--multirun": True})
    planner = Planner()
    plans = [planner.plan(run) for run in start.runs]
    disk = 7 * max(plan.disk.total for plan in plans)
    text = sweep_text(plans, start.trials)
    assert f"total of at most 7 jobs: {short_count(7 * max(plan.data.run_tokens for plan in plans))} tokens" in text
    assert f"{bytes_text(disk)} of disk" in text and len(plans) == 2
    assert "7 jobs of the largest" in capsys.readouterr().err


def test_plan_refuses_what_train_refuses_and_writes_nothing(tmp_path: Path):
    for override in ("train.batch_size=0", "optimizer.lr=1,2", f"resume={tmp_path}/none", "data.path=none.jsonl"):
        with pytest.raises(UserError):
            planned_start([override], {})


def test_truncation_names_the_length_that_keeps_99_percent():
    stats = RowStats(loss_tokens=50)
    stats.count_lost(100, 150)
    cut = measure_truncation([stats], 100)
    assert (cut.lost, cut.total, cut.share) == (50, 100, 0.5) and 149 <= cut.limit <= 156
    assert measure_truncation([RowStats(loss_tokens=50)], 100).limit == 100


def test_leftovers_of_killed_plans_are_removed_and_those_of_living_ones_stay(tmp_path: Path):
    dead, alive = (tmp_path / f"plan-{socket.gethostname()}-{pid}-x" for pid in (2**22 + 1, os.getpid()))
    for folder in (dead, alive, tmp_path / "plan-another.machine-4194305-x"):
        folder.mkdir()
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "plan-another.machine-4194305-x"])


def test_planned_threads_are_those_of_a_rank_and_of_the_container(
    tiny_plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(ranks: int) -> int:
        return plan_execution(tiny_plan.run.config, tiny_plan.model, tiny_plan.data, tiny_plan.machine, ranks).threads

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(cpu, "cpu_limit", lambda: None)
    assert [planned(ranks) for ranks in (1, 2, 3)] == [8, 4, 2]
    monkeypatch.setattr(cpu, "cpu_limit", lambda: 2.5)
    assert planned(1) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert planned(2) == 6


def test_plan_counts_the_ranks_of_a_machine_and_its_checkpoint(tiny_plan: RunPlan) -> None:
    cfg, machine = tiny_plan.run.config, tiny_plan.machine
    three = estimate_memory(cfg, tiny_plan.model, tiny_plan.data, machine, 3, 0)
    assert dataclasses.replace(tiny_plan, memory=three).needed_memory == 3 * three.total
    cfg = with_train(tiny_plan.run.config, save_every=1, keep_checkpoints=2, keep_every=4)
    assert [estimate_disk(cfg, tiny_plan.model, steps).checkpoints for steps in (1, 3, 8)] == [1, 3, 5]
    assert dataclasses.replace(tiny_plan, run=dataclasses.replace(tiny_plan.run, done=3)).steps == 1


def test_time_counts_evaluation_and_samples_after_the_last_step(tiny_plan: RunPlan) -> None:
    names = ("first_step_seconds", "step_seconds", "save_stall_seconds", "save_seconds")
    trial = dict.fromkeys(names, 0.0) | {"eval_seconds": 10.0, "sample_seconds": 1.0}

    def seconds(**train: int) -> float | None:
        cfg = with_train(tiny_plan.run.config, **train)
        return dataclasses.replace(tiny_plan, run=dataclasses.replace(tiny_plan.run, config=cfg), trial=trial).seconds

    assert seconds() == 11 and seconds(eval_every=3, sample_every=2) == 22  # of four steps
    assert seconds(eval_every=0, sample_every=0) == 0 and seconds(eval_every=0, final_eval_rows=5) == 11


def test_sweep_plan_counts_what_is_left_in_every_column(tiny_plan: RunPlan) -> None:
    left = dataclasses.replace(tiny_plan, run=dataclasses.replace(tiny_plan.run, done=3))
    tokens = short_count(tiny_plan.data.run_tokens // tiny_plan.data.steps)
    text = sweep_text([left], 0).splitlines()
    assert text[1].split()[:3] == ["0", "1", tokens] and f": {tokens} tokens" in text[-3]


def test_batch_size_auto_takes_the_largest_size_of_equal_rows_that_fits():
    def alternative(overrides: str, fits: bool, changes: str = "") -> dict[str, object]:
        return {"overrides": overrides, "fits": fits, "changes": changes}

    fits = [
        alternative("train.batch_size=8 train.accumulation_steps=2", fits=False),
        alternative(
            "train.batch_size=7 train.accumulation_steps=2", fits=True, changes="14 rows per step instead of 16"
        ),
        alternative("precision=bf16", fits=True),
        alternative("train.batch_size=4 train.accumulation_steps=4", fits=True),
    ]
    assert fitting_batch({"alternatives": fits}, 16) == "train.batch_size=4 train.accumulation_steps=4"
    assert fitting_batch({"alternatives": []}, 16) == "train.batch_size=16 train.accumulation_steps=1"
    with pytest.raises(UserError, match="not even a micro-batch of one row fits") as raised:
        fitting_batch({"alternatives": fits[:3]}, 16)
    assert "precision=bf16" in raised.value.fix
