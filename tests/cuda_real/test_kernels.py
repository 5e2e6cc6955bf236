"""Kernels of a GPU against the same mathematics in fp64 on the CPU: attention, the loss, and updates."""

import pytest
import torch
import torch.nn.functional as F

from models.language_model import create_model
from models.layers.attention import additive_mask, attention, document_mask
from models.layers.chunked_loss import IGNORE_LABEL, linear_cross_entropy
from runner.config.compose import compose_config
from runner.engine.optim.groups import build_optimizer

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CI has none, type pytest tests/cuda_real on one"
)

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest number
SHAPES = [(2, 40, 4, 2), (4, 256, 4, 4), (1, 1000, 8, 2)]  # B, T, N, K: rows that end within a block, and GQA


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    limit = TOLERANCES[dtype] * float(expected.detach().abs().max())
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=0, atol=limit)


def documents(B: int, T: int) -> torch.Tensor:
    """Ids of documents of 1 to 90 tokens, the last one padding."""
    lengths = torch.randint(1, 90, (B, T))
    ids = torch.stack([torch.arange(T).repeat_interleave(row)[:T] for row in lengths])
    return ids.where(ids < ids[:, -1:], -1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [16, 32, 64, 96, 128])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_has_the_values_and_gradients_of_fp64(shape, is_packed, width, dtype):
    B, T, N, K = shape
    torch.manual_seed(0)
    inputs = [torch.randn(B, heads, T, width, dtype=torch.float64) for heads in (N, K, K)]
    upstream, ids = torch.randn(B, N, T, width, dtype=torch.float64), documents(B, T)
    exact = [each.to(dtype).double().requires_grad_() for each in inputs]  # of the rounded inputs
    is_allowed = torch.ones(T, T, dtype=torch.bool).tril()
    if is_packed:
        is_allowed = (is_allowed & (ids.unsqueeze(2) == ids.unsqueeze(1))).unsqueeze(1)
    q, k, v = exact[0], *(each.repeat_interleave(N // K, 1) for each in exact[1:])
    scores = (q @ k.transpose(-1, -2) / width**0.5).masked_fill(~is_allowed, -torch.inf)
    expected = scores.softmax(-1) @ v
    for is_compiled in (False, True):  # where layers are compiled, FlexAttention computes long rows
        mine = [each.to(DEVICE, dtype).requires_grad_() for each in inputs]
        mask = additive_mask(document_mask(ids.to(DEVICE), 0.0, width, is_compiled), dtype) if is_packed else None
        actual = attention(*mine, mask, 0.0, "auto")
        assert_near(actual, expected, dtype)
        grads = torch.autograd.grad(actual, mine, upstream.to(DEVICE, dtype))
        for grad, expected_grad in zip(
            grads, torch.autograd.grad(expected, exact, upstream.to(dtype).double(), retain_graph=True), strict=True
        ):
            assert_near(grad, expected_grad, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [6_400, 151_936])
def test_loss_has_the_values_and_gradients_of_fp64(vocabulary, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(700, 64, dtype=torch.float64), torch.randn(vocabulary, 64, dtype=torch.float64) / 8
    labels = torch.randint(vocabulary, (700,)).where(torch.rand(700) < 0.7, IGNORE_LABEL)
    exact = [each.to(dtype).double().requires_grad_() for each in (x, weight)]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum", ignore_index=IGNORE_LABEL)
    mine = [each.to(DEVICE, dtype).requires_grad_() for each in (x, weight)]
    actual = linear_cross_entropy(mine[0].unsqueeze(0), mine[1], labels.unsqueeze(0).to(DEVICE), "sum")
    assert float(actual) == pytest.approx(float(expected), rel=TOLERANCES[dtype])
    for grad, expected_grad in zip(
        torch.autograd.grad(actual, mine), torch.autograd.grad(expected, exact), strict=True
    ):
        assert_near(grad, expected_grad, dtype)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_update_is_that_of_the_cpu_and_none_where_a_gradient_is_not_finite(name):
    """Muon orthogonalizes in bf16, which rounds otherwise on a GPU."""
    cfg = compose_config([f"optimizer={name}", "model.hidden_size=64", "model.head_dim=16", "init_from=scratch"])
    weights = dict[str, dict[str, torch.Tensor]]()
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = create_model(cfg.model)
        gradients = [torch.randn(p.shape) for p in model.parameters()]
        model.to(device)
        optimizers = build_optimizer(cfg.optimizer, model, cfg.model.num_hidden_layers)
        optimizers.set_lr(1e-2)
        for found_inf in (0.0, 1.0):
            before = {key: p.detach().clone() for key, p in model.named_parameters()}
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.to(device)
            optimizers.step(torch.tensor(found_inf, device=device))
            is_equal = all(torch.equal(p, before[key]) for key, p in model.named_parameters())
            assert is_equal == bool(found_inf)
        weights[device] = {key: p.detach().cpu() for key, p in model.named_parameters()}
    for key, expected in weights["cpu"].items():
        torch.testing.assert_close(weights[DEVICE][key], expected, rtol=0, atol=1e-6 if name == "adamw" else 1e-3)
