import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from models.language_model import LanguageModel
from runner.config.compose import compose_config
from runner.engine.optim import torch_optimizers as orthogonalization
from runner.engine.optim.config import OPTIMIZERS, AdamWConfig, MuonConfig, OptimizerConfig
from runner.engine.optim.groups import OptimizerGroup, build_optimizer
from runner.engine.optim.schedules import (
    SCHEDULES,
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    ScheduleConfig,
    WsdConfig,
    describe_lr_jump,
    lr_at,
)
from runner.engine.optim.torch_optimizers import Muon, orthogonalize, split_batches

DTYPES = (torch.bfloat16, torch.float32)


def adamw(layer_decay: float = 1.0) -> AdamWConfig:
    return AdamWConfig(
        "adamw", lr=1e-2, weight_decay=0.1, grad_clip=1.0, layer_decay=layer_decay, betas=[0.9, 0.95], eps=1e-8
    )


def muon() -> MuonConfig:
    return MuonConfig(
        "muon", lr=1e-2, weight_decay=0.1, grad_clip=1.0, layer_decay=1.0, betas=[0.9, 0.95], eps=1e-8, momentum=0.95
    )


SCHEDULE = {
    "cosine": CosineConfig("cosine", 0, 0.1),
    "linear": LinearConfig("linear", 0, 0.1),
    "wsd": WsdConfig("wsd", 0, 0.1, 0.2),
    "constant": ConstantConfig("constant", 0),
}


class SmallModel(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(6, 4),
                "layers": nn.ModuleList(
                    nn.ModuleDict({"proj": nn.Linear(4, 4), "norm": nn.RMSNorm(4)}) for _ in range(2)
                ),
                "norm": nn.RMSNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 6, bias=False)


@pytest.fixture(params=OPTIMIZERS.names())
def config(request: pytest.FixtureRequest) -> OptimizerConfig:
    """The config of every registered optimizer."""
    return compose_config(["stage=sft", f"optimizer={request.param}"]).optimizer


@pytest.mark.parametrize("name", SCHEDULES.names())
def test_schedule_starts_at_the_full_lr_and_stays_in_bounds(name: str) -> None:
    schedule: ScheduleConfig = compose_config([f"schedule={name}"]).schedule
    lrs = [lr_at(step, 100, 1.0, schedule) for step in range(101)]
    assert lrs[0] == 1.0 == max(lrs) and min(lrs) >= 0


@pytest.mark.parametrize("name, last", [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_schedule_ends_at_min_lr_ratio(name: str, last: float) -> None:
    assert lr_at(100, 100, 1.0, SCHEDULE[name]) == pytest.approx(last)


def test_schedule_warmup_rises_linearly_to_the_full_lr() -> None:
    assert [lr_at(step, 100, 1.0, CosineConfig("cosine", 4, 0.1)) for step in range(5)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0]
    )


def test_schedule_cosine_equals_the_formula_of_minimind() -> None:
    for t in range(51):
        assert lr_at(t, 50, 5e-4, SCHEDULE["cosine"]) == pytest.approx(
            5e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / 50)))
        )


@pytest.mark.parametrize(
    ("name", "step", "before", "total", "line"),
    [
        (
            "cosine",
            60,
            60,
            120,
            "goes from 2.0e-04 back to 1.1e-03: the schedule now ends at step 120; schedule=constant optimizer.lr=0.0002 keeps it",
        ),
        ("linear", 50, 100, 60, "goes from 1.1e-03 to 5.0e-04: the schedule now ends at step 60"),
        ("wsd", 60, 60, 120, "back to 2.0e-03"),
        ("wsd", 20, 60, 120, None),  # still at the full rate
        ("constant", 60, 60, 120, None),
        ("cosine", 30, 60, 60, None),
        ("cosine", 30, 60, 61, None),  # less than 5 %
        ("cosine", 60, 60, 60, None),
    ],
)
def test_resume_names_the_learning_rate_that_a_new_length_changes(
    name: str, step: int, before: int, total: int, line: str | None
) -> None:
    schedule: ScheduleConfig = compose_config([f"schedule={name}", "schedule.warmup_steps=0"]).schedule
    facts = {f"schedule.{key}": value for key, value in dataclasses.asdict(schedule).items()} | {
        "optimizer.lr": 2e-3,
        "train.epochs": 1,
    }
    for length in ({"train.max_steps": before}, {"train.max_steps": 0}):  # 0: epochs of `before` steps
        found = describe_lr_jump(step, facts | length, before, total, 2e-3, schedule)
        assert found is None if line is None else found is not None and line in found
    # a checkpoint that does not record its settings
    assert describe_lr_jump(step, {}, before, total, 2e-3, schedule) is None


def test_schedule_wsd_is_constant_until_its_decay() -> None:
    assert {lr_at(step, 100, 1.0, SCHEDULE["wsd"]) for step in range(81)} == {1.0}
    assert lr_at(90, 100, 1.0, WsdConfig("wsd", 0, 0.0, 0.2)) == pytest.approx(0.5)


def test_optimizer_decays_hidden_matrices_only(config: OptimizerConfig) -> None:
    built = build_optimizer(dataclasses.replace(config, weight_decay=0.1), SmallModel(), num_layers=2)
    decayed = {
        built.names[p]
        for part in built.parts
        for group in part.param_groups
        if group["weight_decay"]
        for p in group["params"]
    }
    assert decayed == {"model.layers.0.proj.weight", "model.layers.1.proj.weight"}


def test_optimizer_finds_embeddings_layers_and_experts_under_any_name() -> None:
    class ForeignModel(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(6, 4)
            self.h = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(4, 4)}) for _ in range(2))
            self.experts = nn.Parameter(torch.zeros(3, 4, 4))
            self.head = nn.Linear(4, 6, bias=False)

        @property
        def output_layer(self) -> nn.Module:
            return self.head

    built = build_optimizer(dataclasses.replace(muon(), layer_decay=0.5), ForeignModel(), num_layers=2)
    groups = {
        built.names[p]: (i, group["weight_decay"], group["lr_scale"])
        for i, part in enumerate(built.parts)
        for group in part.param_groups
        for p in group["params"]
    }
    assert groups["wte.weight"] == (1, 0.0, 0.125) and groups["head.weight"] == (1, 0.0, 1.0)
    assert groups["experts"] == (1, 0.1, 1.0) and groups["h.0.attn.weight"] == (0, 0.1, 0.25)
    assert {name for name, (part, *_) in groups.items() if part == 0} == {"h.0.attn.weight", "h.1.attn.weight"}


def test_optimizer_layer_decay_multiplies_lr_by_a_factor_per_layer() -> None:
    built = build_optimizer(adamw(layer_decay=0.5), SmallModel(), num_layers=2)
    built.set_lr(1.0)
    lrs = {built.names[p]: group["lr"] for part in built.parts for group in part.param_groups for p in group["params"]}
    names = (
        "model.norm.weight",
        "model.layers.1.proj.weight",
        "model.layers.0.norm.weight",
        "model.embed_tokens.weight",
    )
    assert [lrs[name] for name in names] == [1.0, 0.5, 0.25, 0.125]


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    built = build_optimizer(muon(), SmallModel(), num_layers=2)
    matrices, rest = ({built.names[p] for group in part.param_groups for p in group["params"]} for part in built.parts)
    assert isinstance(built.parts[0], Muon) and matrices == {"model.layers.0.proj.weight", "model.layers.1.proj.weight"}
    assert rest == set(built.names.values()) - matrices


def test_muon_with_frozen_matrices_trains_the_rest() -> None:
    model = SmallModel()
    model.model["layers"].requires_grad_(False)
    [adamw] = build_optimizer(muon(), model, num_layers=2).parts
    assert not isinstance(adamw, Muon)


def test_optimizer_settings_reach_every_parameter_group() -> None:
    """With betas, eps and momentum that are not torch's defaults."""
    built = build_optimizer(
        dataclasses.replace(muon(), betas=[0.5, 0.75], eps=0.25, momentum=0.5), SmallModel(), num_layers=2
    )
    matrices, rest = built.parts
    assert {group["momentum"] for group in matrices.param_groups} == {0.5}
    assert {(group["betas"], group["eps"]) for group in rest.param_groups} == {((0.5, 0.75), 0.25)}


def test_muon_is_bitwise_equal_to_torch_muon() -> None:
    torch.manual_seed(0)
    shapes = ((8, 24), (24, 8), (16, 16))
    ours, copies = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes]
        for _ in range(2)
    )
    optimizer = Muon([{"params": ours, "weight_decay": 0.1}], lr=0.02, momentum=0.95)
    expected = torch.optim.Muon(copies, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for p, q in zip(ours, copies, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step(), expected.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, copies, strict=True))


def random_matrices(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def orthogonalize_in_fp64(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def decaying(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with singular values from 1 to 1e-7."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ torch.logspace(0, -7, len(s)).diag() @ v


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spectrum, fp32_bound", [(torch.Tensor.clone, 1e-4), (decaying, 2e-3)])
def test_muon_orthogonalization_is_near_that_of_fp64(
    dtype: torch.dtype, is_batched: bool, spectrum: Callable[[torch.Tensor], torch.Tensor], fp32_bound: float
) -> None:
    """Shapes with and without GRAM_RATIO, transposed ones and one alone in its batch."""
    matrices = [
        spectrum(matrix)
        for matrix in random_matrices((32, 96), (96, 32), (64, 64), (32, 96), (64, 64), (8, 64), (40, 48))
    ]
    bound = fp32_bound if dtype == torch.float32 else 0.03 if spectrum is not decaying else 1.0
    batches = split_batches(matrices) if is_batched else [[matrix] for matrix in matrices]
    assert sum(len(batch) for batch in batches) == len(matrices)
    for batch in batches:
        results = orthogonalize(torch.stack(batch) if len(batch) > 1 else batch[0], dtype)
        for matrix, result in zip(batch, results if len(batch) > 1 else [results], strict=True):
            expected = orthogonalize_in_fp64(matrix)
            assert result.shape == matrix.shape and (result.double() - expected).norm() <= bound * expected.norm()


def test_muon_batches_have_one_shape_and_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = random_matrices((4, 8), (8, 8), (8, 4), (4, 8), (16, 16), (4, 8))
    assert [[matrix.shape for matrix in batch] for batch in split_batches(matrices)] == [
        [(4, 8), (4, 8), (4, 8)],
        [(8, 8)],
        [(8, 4)],
        [(16, 16)],
    ]
    monkeypatch.setattr(orthogonalization, "BATCH_NUMBERS", 64)
    # a matrix with more numbers is alone
    assert [len(batch) for batch in split_batches(matrices)] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_muon_batch_is_within_rounding_of_its_matrices_alone(dtype: torch.dtype) -> None:
    """The products may add in another order: the bound is a few roundings of the dtype."""
    batch = random_matrices((96, 16), (96, 16), (96, 16))
    for matrix, result in zip(batch, orthogonalize(torch.stack(batch), dtype), strict=True):
        alone = orthogonalize(matrix, dtype)
        assert (result - alone).norm() <= 8 * torch.finfo(result.dtype).eps * alone.norm()


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_muon_trains_deterministically_and_skips(dtype: torch.dtype, is_batched: bool) -> None:
    """Loss of a network of two layers falls; two trainings are bitwise equal; a step with found_inf changes no bit."""

    def train() -> tuple[list[float], list[torch.Tensor]]:
        first, second, inputs, targets = random_matrices((24, 12), (12, 24), (64, 12), (64, 12))
        weights = [nn.Parameter(0.1 * first), nn.Parameter(0.1 * second), nn.Parameter(torch.eye(12))]
        optimizer = Muon([{"params": weights, "weight_decay": 0.1}], lr=0.02, momentum=0.95, is_batched=is_batched)
        optimizer.dtype = dtype
        losses = []
        for step in range(20):
            loss = ((inputs @ weights[0].T).relu() @ weights[1].T @ weights[2] - targets).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            if step == 10:
                state = [*weights, *(optimizer.state[p]["momentum_buffer"] for p in weights)]
                before = [value.detach().clone() for value in state]
                for p in weights:
                    p.grad = torch.full_like(p, math.nan)
                optimizer.found_inf = torch.ones(())
                optimizer.step()
                optimizer.found_inf = torch.zeros(())
                assert all(torch.equal(value, old) for value, old in zip(state, before, strict=True))
            optimizer.zero_grad()
        return losses, weights

    (losses, weights), (_, again) = train(), train()
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(p, q) for p, q in zip(weights, again, strict=True))


def test_optimizer_skipped_step_changes_no_bit_of_weights_and_state(config: OptimizerConfig) -> None:
    built = build_optimizer(config, model := SmallModel(), num_layers=2)

    def bits() -> dict[str, torch.Tensor]:
        return {
            name: value.clone().view(torch.int32)
            for name, value in {**dict(model.named_parameters()), **built.state_dict()}.items()
        }

    for found_inf, grad in ((0.0, 1.0), (1.0, math.nan), (0.0, 1.0)):
        for p in model.parameters():
            p.grad = torch.full_like(p, grad)
        before = bits()
        built.step(torch.tensor(found_inf))
        after = bits()
        changed = [name for name, value in after.items() if name not in before or not torch.equal(before[name], value)]
        assert len(changed) == (0 if found_inf else len(after))
        assert all(p.isfinite().all() for p in model.parameters())


def test_optimizer_state_is_restored_by_parameter_name_without_lr(config: OptimizerConfig) -> None:
    def with_gradients(model: SmallModel) -> OptimizerGroup:
        built = build_optimizer(config, model, num_layers=2)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        return built

    torch.manual_seed(0)
    first, second = with_gradients(SmallModel()), with_gradients(SmallModel())
    first.step(torch.tensor(0.0))
    second.set_lr(0.5)
    second.load_state_dict(first.state_dict())
    assert first.state_dict().keys() == second.state_dict().keys() != set()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert {group["lr"] for part in second.parts for group in part.param_groups} == {0.5}


def test_optimizer_averages_parameters_after_each_step_that_counts(config: OptimizerConfig) -> None:
    model = SmallModel()
    built = build_optimizer(config, model, num_layers=2, ema_decay=0.9)
    expected: dict[str, torch.Tensor] = {}
    for n, found_inf in ((0, 0.0), (1, 0.0), (2, 1.0), (3, 0.0), (99, 0.0)):
        built.steps_done = n
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        built.step(torch.tensor(found_inf))
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        if not found_inf:
            decay = min(0.9, (1 + n) / (10 + n))
            expected = {name: decay * expected[name] + (1 - decay) * p if expected else p for name, p in now.items()}
    restored = build_optimizer(config, other := SmallModel(), num_layers=2, ema_decay=0.9)
    restored.load_state_dict(built.state_dict())
    restored.use_averages()
    for name, p in other.named_parameters():
        torch.testing.assert_close(p, expected[name])
    without = build_optimizer(config, SmallModel(), num_layers=2)
    without.load_state_dict(built.state_dict())
    assert not without.averages and without.state_dict().keys() == {
        key for key in built.state_dict() if not key.endswith("/average")
    }


def test_optimizer_state_of_an_untrained_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not trained here: value_head\.weight"):
        build_optimizer(adamw(), SmallModel(), num_layers=2).load_state_dict(
            {"value_head.weight/step": torch.tensor(1.0)}
        )


@pytest.mark.parametrize(
    "override",
    ["optimizer.lr=0", "optimizer.betas=[0.9]", "optimizer.eps=0", "optimizer.momentum=1", "optimizer.layer_decay=2", "optimizer.weight_decay=-1",
     "optimizer.grad_clip=-1", "schedule.min_lr_ratio=2", "schedule.warmup_steps=-1"],
)  # fmt: skip
def test_optimizer_and_schedule_settings_out_of_range_are_refused(override: str) -> None:
    key, _, _ = override.partition("=")
    with pytest.raises(ValueError) as error:
        compose_config(["optimizer=muon", override])
    assert (
        f"{key} must be" in error.value.args[0]
        and error.value.args[1].startswith(f"{key}=")
        and f"{key}=" in error.value.args[2]
    )


def test_schedule_decays_over_the_steps_that_follow_the_warmup() -> None:
    lrs = [lr_at(step, 110, 1.0, LinearConfig("linear", 10, 0.0)) for step in range(10, 111)]
    assert lrs == pytest.approx([1 - k / 100 for k in range(101)])
