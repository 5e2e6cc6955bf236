"""`train.deterministic` as far as a machine without a GPU can show it."""

import pytest
import torch

from common.errors import UserError
from runner.engine.device import rng
from runner.engine.device.rng import allow_varying_kernels, use_deterministic_kernels
from runner.engine.loop import train


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


def test_operators_must_be_deterministic_but_for_sampling(monkeypatch):
    """Without `warn_only`: with it torch's attention on a GPU keeps its varying kernels."""
    seen = []  # by torch when it asks
    monkeypatch.setattr(
        torch, "ones", lambda *_, **__: seen.append(rng.os.environ["CUBLAS_WORKSPACE_CONFIG"]) or torch.zeros(1, 1)
    )
    use_deterministic_kernels(True)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    # as long as it is set each product takes four times as long to launch
    assert seen == [":4096:8"] and "CUBLAS_WORKSPACE_CONFIG" not in rng.os.environ
    with pytest.raises(KeyError), allow_varying_kernels():
        assert not torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled()
    use_deterministic_kernels(False)
    with allow_varying_kernels():
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_operator_without_a_deterministic_kernel_is_refused_with_a_fix(make_run, monkeypatch):
    state = make_run("pretrain")

    def fail(*_):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation, but you set ...")

    monkeypatch.setattr(state.objective, "loss", fail)
    with pytest.raises(UserError, match="cumsum_cuda_kernel") as raised:
        train(state)
    assert raised.value.fix == "train.deterministic=false"


def test_random_state_of_one_gpu_is_restored_where_others_are_visible(monkeypatch):
    """Saved where eight GPUs were visible, resumed with one: only this process's GPU counts."""
    current = torch.arange(16, dtype=torch.uint8)
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    saved = rng.get_rng_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rng.set_rng_state(saved)
    assert [state.tolist() for state in restored] == [current.tolist()]
