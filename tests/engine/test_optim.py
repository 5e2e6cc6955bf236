import math

import pytest
import torch
from torch import nn

from runner.engine.optim.config import OptimizerConfig
from runner.engine.optim.groups import build_optimizer
from runner.engine.optim.muon import Muon
from runner.engine.optim.schedules import ScheduleConfig, lr_at


def schedule(name: str, warmup_steps: int = 0, min_lr_ratio: float = 0.1, decay_fraction: float = 0.2) -> ScheduleConfig:
    return ScheduleConfig(name, warmup_steps, min_lr_ratio, decay_fraction)


def optimizer(name: str = "adamw", **changes) -> OptimizerConfig:
    return OptimizerConfig(
        **{"name": name, "lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "grad_clip": 1.0, "layer_decay": 1.0, "momentum": 0.95} | changes
    )


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(6, 4),
                "layers": nn.ModuleList(nn.ModuleDict({"proj": nn.Linear(4, 4), "norm": nn.RMSNorm(4)}) for _ in range(2)),
                "norm": nn.RMSNorm(4),
            }
        )


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_the_first_step_has_the_full_rate_and_none_is_negative(name):
    rates = [lr_at(step, 100, 1.0, schedule(name)) for step in range(101)]
    assert rates[0] == 1.0 and min(rates) >= 0.1 - 1e-12


@pytest.mark.parametrize("name, last", [("cosine", 0.1), ("linear", 0.1), ("wsd", 0.1), ("constant", 1.0)])
def test_each_schedule_ends_where_it_says(name, last):
    assert lr_at(100, 100, 1.0, schedule(name)) == pytest.approx(last)


def test_warmup_climbs_in_equal_steps_to_the_full_rate():
    assert [lr_at(step, 100, 1.0, schedule("cosine", warmup_steps=4)) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_without_warmup_is_minimind_s_formula():
    for t in range(51):
        assert lr_at(t, 50, 5e-4, schedule("cosine")) == pytest.approx(5e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * t / 50))))


def test_wsd_is_flat_until_its_decay():
    assert {lr_at(step, 100, 1.0, schedule("wsd")) for step in range(81)} == {1.0}
    assert lr_at(90, 100, 1.0, schedule("wsd", min_lr_ratio=0.0)) == pytest.approx(0.5)


def test_only_hidden_matrices_decay():
    built = build_optimizer(optimizer(), Small(), num_layers=2)
    decaying = {built.names[p] for part in built.parts for group in part.param_groups if group["weight_decay"] for p in group["params"]}
    assert decaying == {"model.layers.0.proj.weight", "model.layers.1.proj.weight"}


def test_layer_decay_slows_each_layer_below_by_the_factor():
    built = build_optimizer(optimizer(layer_decay=0.5), Small(), num_layers=2)
    built.set_lr(1.0)
    rates = {built.names[p]: group["lr"] for part in built.parts for group in part.param_groups for p in group["params"]}
    assert [rates[name] for name in ("model.norm.weight", "model.layers.1.proj.weight", "model.layers.0.norm.weight", "model.embed_tokens.weight")] == [
        1.0,
        0.5,
        0.25,
        0.125,
    ]


def test_muon_takes_the_hidden_matrices_and_adamw_all_else():
    muon, adamw = build_optimizer(optimizer("muon"), model := Small(), num_layers=2).parts
    names = {p: name for name, p in model.named_parameters()}
    assert isinstance(muon, Muon) and {names[p] for g in muon.param_groups for p in g["params"]} == {
        "model.layers.0.proj.weight",
        "model.layers.1.proj.weight",
    }
    assert sum(len(g["params"]) for g in adamw.param_groups) == len(names) - 2


def test_muon_is_torch_s_own_to_the_bit():
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in ((8, 24), (24, 8), (16, 16))] for _ in "12")
    mine = Muon([{"params": ours, "weight_decay": 0.1}], lr=0.02, momentum=0.95)
    its = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step(), its.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_missed_step_leaves_every_bit_of_weights_and_state(name):
    built = build_optimizer(optimizer(name), model := Small(), num_layers=2)

    def bits() -> dict[str, torch.Tensor]:
        return {word: value.clone().view(torch.int32) for word, value in {**dict(model.named_parameters()), **built.state()}.items()}

    for missed, grad in ((0.0, 1.0), (1.0, math.nan), (0.0, 1.0)):
        for p in model.parameters():
            p.grad = torch.full_like(p, grad)
        before = bits()
        built.step(torch.tensor(missed))
        after = bits()
        changed = [word for word, value in after.items() if word not in before or not torch.equal(before[word], value)]
        assert len(changed) == (0 if missed else len(after))
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_goes_back_to_its_parameter_by_name_and_leaves_the_rate_alone(name):
    def stepped(model: Small):
        built = build_optimizer(optimizer(name), model, num_layers=2)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        return built

    torch.manual_seed(0)
    first = stepped(Small())
    for part in first.parts:
        part.step()
    second = stepped(Small())
    second.set_lr(0.5)
    second.load_state(first.state())
    assert first.state().keys() == second.state().keys() != set()
    assert all(torch.equal(value, second.state()[word]) for word, value in first.state().items())
    assert {group["lr"] for part in second.parts for group in part.param_groups} == {0.5}


def test_state_of_a_parameter_that_does_not_learn_is_refused_by_name():
    with pytest.raises(ValueError, match="do not learn") as refusal:
        build_optimizer(optimizer(), Small(), num_layers=2).load_state({"lm_head.weight/step": torch.tensor(1.0)})
    assert refusal.value.args[1] == "lm_head.weight"
