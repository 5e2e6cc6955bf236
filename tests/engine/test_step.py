"""One optimizer step: clipping, loss scaling, sums over ranks, and what is logged of it."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.engine import step_metrics
from runner.engine.build import distribute
from runner.engine.device import rng
from runner.engine.device.distributed import DistributedContext
from runner.engine.device.precision import Precision, PrecisionConfig, exceeds
from runner.engine.loop import train, train_step
from runner.engine.step_metrics import StepResult, Throughput, fetch_results

GRADIENT = [3.0, 0.0, -4.0]  # norm 5


class Sgd:
    """p -= gradient, as the optimizers of a run are used."""

    def __init__(self, p: nn.Parameter) -> None:
        self.parts, self.names = [torch.optim.SGD([p], lr=1.0)], {p: "p"}

    def step(self, found_inf: Tensor) -> None:
        if not found_inf.item():
            self.parts[0].step()

    def zero_grad(self) -> None:
        self.parts[0].zero_grad()


@pytest.mark.parametrize("clip, factor", [(2.0, 0.4), (1.0, 0.2), (10.0, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradient_is_clipped_to_its_norm_and_the_norm_before_is_reported(
    precision: str, clip: float, factor: float
) -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer, device = Sgd(p), Precision(PrecisionConfig(precision), torch.device("cpu"))
    for step in (1, 2):  # the second step starts without the gradients of the first
        device.backward((p * torch.tensor(GRADIENT)).sum())
        stats = device.clip_and_update(optimizer, clip)
        assert stats.norm.item() == pytest.approx(5.0, rel=1e-5) and stats.norms.tolist() == pytest.approx(
            [5.0], rel=1e-5
        )
        assert p.tolist() == pytest.approx([-step * factor * g for g in GRADIENT], rel=1e-5)


def step_of_two_ranks(rank: int, file: str, norms: multiprocessing.SimpleQueue) -> None:
    """Update a parameter of which each rank has half, with gradient [3, 4]."""
    from torch.distributed import FileStore, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    init_process_group("gloo", store=FileStore(file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
    stats = Precision(PrecisionConfig("fp32"), torch.device("cpu")).clip_and_update(Sgd(p), clip=1.0)
    norms.put((rank, stats.norm.item(), p.to_local().item()))


def test_gradient_norm_of_sharded_parameters_is_that_of_all_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # torch is imported already
    norms = context.SimpleQueue()
    ranks = [
        context.Process(target=step_of_two_ranks, args=(rank, str(tmp_path / "store"), norms)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    results = sorted(norms.get() for _ in ranks)
    assert [norm for _, norm, _ in results] == [5.0, 5.0]
    assert [value for _, _, value in results] == pytest.approx([-0.6, -0.8], rel=1e-5)


class TwinRanks(DistributedContext):
    """Two ranks with the same batches, in one process: a sum over ranks is twice the number."""

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        return [2 * number for number in numbers]

    def no_sync_until_last(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager:
        return nullcontext()

    def arm_watchdog(self) -> None:
        pass


def first_step(state) -> StepResult:
    (result,) = fetch_results(state, [train_step(state, next(state.loader.iter_epoch(0)), lr=1e-9)])
    return result


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_step_of_two_equal_ranks_has_the_loss_of_one_and_twice_its_tokens(make_run, stage) -> None:
    one, two = (
        make_run(stage, "train.batch_size=2", "train.accumulation_steps=2", folder=folder) for folder in ("one", "two")
    )
    two.dist = TwinRanks(0, 2, two.dist.device, two.dist.cfg)
    alone, together = first_step(one), first_step(two)
    assert together.means == pytest.approx(alone.means, rel=1e-5) and together.grad_norm == pytest.approx(
        alone.grad_norm, rel=1e-5
    )
    counts = zip(together.output.counts, alone.output.counts, strict=True)
    assert all(both == 2 * one_rank > 0 for both, one_rank in counts)


def test_grad_norm_of_a_step_is_that_of_the_mean_loss(make_run) -> None:
    state = make_run("sft", "train.batch_size=3", "train.accumulation_steps=2", "optimizer.grad_clip=0.01")
    batches = next(state.loader.iter_epoch(0))
    loss = sum(state.model(**batch.inputs, reduction="sum").nll for batch in batches) / sum(
        int((batch.labels != -100).sum()) for batch in batches
    )
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).norm().item()
    assert first_step(state).grad_norm == pytest.approx(expected, rel=1e-4) and expected > 0.1


def test_throughput_counts_tokens_without_padding(make_run, monkeypatch) -> None:
    state, counted = make_run("sft", "train.max_steps=3"), []
    steps = [batches for _, batches in zip(range(3), state.loader.iter_epoch(0), strict=False)]
    monkeypatch.setattr(Throughput, "count", lambda throughput, tokens: counted.append(tokens))
    train(state)
    assert counted == [sum(int(batch.lengths.sum()) for batch in batches) for batches in steps]
    # the test can fail
    assert any(batch.input_ids.numel() > batch.lengths.sum() for batches in steps for batch in batches)


def test_throughput_leaves_out_the_time_while_it_is_paused(monkeypatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: clock[0])
    throughput = Throughput(lambda: True)
    clock[0] += 2
    throughput.count(100)
    with throughput.paused():
        clock[0] += 10
    assert throughput.read()["tokens_per_second"] == 50


def test_throughput_leaves_out_the_time_of_logging_and_of_the_page(make_run, monkeypatch) -> None:
    state, clock = make_run("pretrain", "train.max_steps=3", "train.log_every=1"), [0.0]
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: clock[0])
    rates = list[float]()

    def log(kind: str, step: int, **numbers: float) -> None:
        clock[0] += 1000  # of a page
        rates.extend([numbers["tokens_per_second"]] if kind == "train" else [])

    def count(throughput: Throughput, tokens: int) -> None:
        clock[0] += 1
        throughput._tokens += 100

    monkeypatch.setattr(state.logger, "log", log)
    monkeypatch.setattr(Throughput, "count", count)
    train(state)
    assert rates == [100.0, 100.0, 100.0]


def test_state_restores_the_loss_scale(make_run) -> None:
    saved, restored = (
        make_run("pretrain", "precision=fp16", folder="saved"),
        make_run("pretrain", "precision=fp16", folder="restored"),
    )
    saved.precision.load_state_dict(saved.precision.state_dict() | {"scale": 512.0, "_growth_tracker": 7})
    restored.load_state_dict(saved.state_dict())
    assert restored.precision.state_dict() == saved.precision.state_dict() and restored.precision.loss_scale == 512


@pytest.mark.parametrize(
    "norm, clips", [(0.5, False), (0.9999, False), (1.0, True), (1.001, True), (1.5, True), (float("nan"), True)]
)
def test_gradients_are_clipped_from_the_limit_on(norm: float, clips: bool) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_` does: other factors than 1.

    A norm that is not a number is left to it.
    """
    assert exceeds(torch.tensor(norm), 1.0) == clips
    assert norm != norm or (min(1.0, 1.0 / (norm + 1e-6)) != 1) == clips


def test_random_states_of_python_numpy_and_torch_are_restored() -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.random(),
            np.random.standard_normal(),
            torch.rand(()).item(),
        ]

    rng.seed_all(5)
    draw()  # gauss and standard_normal keep the second of two numbers
    saved = json.loads(json.dumps(rng.get_rng_state()))
    expected = draw()
    rng.seed_all(6)
    rng.set_rng_state(saved)
    assert draw() == expected


def test_fp16_halves_the_loss_scale_if_only_the_norm_overflows() -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer, device = Sgd(p), Precision(PrecisionConfig("fp16"), torch.device("cpu"))
    before = device.loss_scale
    device.backward((p * 1e25).sum())
    stats = device.clip_and_update(optimizer, clip=1.0)
    assert stats.norm.isinf() and p.tolist() == [0.0, 0.0, 0.0]
    assert device.should_retry(stats) and device.loss_scale == before / 2


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_progress_counts_the_examples_of_an_epoch(make_run, packing: str) -> None:
    state = make_run("sft", f"data.packing={packing}", "train.batch_size=2", "train.accumulation_steps=2", rows=11)
    train(state)
    assert state.progress.examples == 11


def test_ranks_that_a_resume_adds_draw_numbers_of_their_own(make_run) -> None:
    state, draws = make_run("pretrain"), []
    saved = state.state_dict()
    for rank in range(3):
        state.dist = TwinRanks(rank, 3, state.dist.device, state.dist.cfg)
        state.load_state_dict(saved)
        draws.append(torch.rand(()).item())
    assert len(set(draws)) == 3


def test_ranks_draw_numbers_of_their_own_from_the_start(make_run) -> None:
    state, draws = make_run("pretrain"), []
    for rank in range(3):
        rng.seed_all(state.cfg.seed)
        distribute(state.cfg, TwinRanks(rank, 3, state.dist.device, state.dist.cfg), state.precision, ())
        draws.append(torch.rand(()).item())
    assert len(set(draws)) == 3
