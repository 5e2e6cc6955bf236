"""device=mps as far as a CPU can show it: what is chosen, what is refused by name, and that no tensor of a step needs
fp64.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine_fixtures import composed
from tiny_models import config

from common.errors import UserError
from models.layers.attention import repeat_heads
from models.layers.ops import widest_float
from runner.engine.device import precision, rng
from runner.engine.device.compile import resolve_compile_mode
from runner.engine.device.distributed import init_distributed, resolve_device

MPS = torch.device("mps")


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch say that it has a GPU of Apple; tensors there cannot be created."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)


def test_device_auto_is_mps_on_a_mac_for_one_process(mac: None) -> None:
    assert resolve_device("auto") == resolve_device("mps") == MPS
    assert resolve_device("auto", local_rank=0).type == "cpu"
    assert init_distributed(composed("device=mps").distributed, "auto").device == MPS


@pytest.mark.parametrize("device", ["mps", "mps:0"])
def test_device_mps_without_metal_is_refused(device: str) -> None:
    with pytest.raises(UserError, match="torch cannot compute on mps|device must be auto, cpu"):
        resolve_device(device)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distributed=ddp", "distributed.nproc=2"], "device=mps is one GPU and trains in one process"),
        (["distributed=fsdp", "distributed.nproc=2"], "device=mps is one GPU and trains in one process"),
        (["precision=tf32"], "needs an NVIDIA GPU .* got a GPU of Apple"),
        (["train.compile=default"], "train.compile=default is not supported on mps"),
    ],
)
def test_what_mps_cannot_compute_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        composed("device=mps", *overrides)


def test_bf16_on_mps_needs_macos_14(mac: None) -> None:
    with pytest.raises(UserError, match="no bf16 on mps before macOS 14"):
        precision.Precision(dataclasses.replace(composed().precision, name="bf16"), MPS)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_precisions_of_mps(mac: None, name: str, dtype: torch.dtype) -> None:
    chosen = precision.Precision(dataclasses.replace(composed().precision, name=name), MPS)
    assert (chosen.dtype, chosen.uses_loss_scaling) == (dtype, name == "fp16")
    assert widest_float(MPS) == torch.float32 and widest_float(torch.device("cpu")) == torch.float64


def test_compile_auto_is_off_on_mps() -> None:
    assert resolve_compile_mode("auto", 1e30, MPS, 8, config(), False).mode == "off"


def test_random_state_of_mps_is_saved_and_restored(mac: None, monkeypatch: pytest.MonkeyPatch) -> None:
    restored = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: torch.arange(8, dtype=torch.uint8))
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    rng.set_rng_state(rng.get_rng_state())
    assert restored[0].tolist() == list(range(8))


def test_repeated_heads_are_those_of_grouped_query_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    grouped = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(
        torch.nn.functional.scaled_dot_product_attention(q, repeat_heads(q, k), repeat_heads(q, v), is_causal=True),
        grouped,
    )
