"""Which device computes in which precision, and that fp32 means fp32.

No GPU is needed: its answers are patched in.
"""

import pytest
import torch

from common.errors import UserError
from runner.checkpoint import compatibility
from runner.engine.device import distributed
from runner.engine.device.compile import CUDA_GRAPH_MODES, check_cuda_graphs
from runner.engine.device.precision import Precision, PrecisionConfig

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """`gpu((8, 0))`: a CUDA device that reports this compute capability."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return make


@pytest.fixture(autouse=True)
def restore_matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_precision_tf32_is_refused_on_devices_without_it(gpu):
    assert Precision(PrecisionConfig("tf32"), gpu((8, 0))).name == "tf32"
    for device, name in ((gpu((7, 5)), "a GPU"), (CPU, "the CPU")):
        with pytest.raises(
            ValueError, match=f"needs an NVIDIA GPU of compute capability 8.0 or higher, got {name}"
        ) as error:
            Precision(PrecisionConfig("tf32"), device)
        assert error.value.args[1] == f"precision=tf32 on {name}" and error.value.args[2].startswith("precision=fp32")


def test_precision_tf32_is_refused_on_amd_gpus(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="NVIDIA"):
        Precision(PrecisionConfig("tf32"), gpu((9, 4)))


def test_precision_fp32_disables_tf32_and_autocast(gpu):
    torch.set_float32_matmul_precision("high")
    assert not Precision(PrecisionConfig("fp32"), CPU).autocast()._enabled
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    tf32 = Precision(PrecisionConfig("tf32"), gpu((9, 0)))
    assert (
        torch.get_float32_matmul_precision() == "high"
        and torch.backends.cuda.matmul.allow_tf32
        and tf32.dtype == torch.float32
    )
    Precision(PrecisionConfig("bf16"), CPU)
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("device", "has_bf16", "expected"),
    [("cuda", True, "bf16"), ("cuda", False, "fp32"), ("cpu", True, "fp32"), ("mps", True, "fp32")],
)
def test_precision_auto_is_bf16_on_a_gpu_that_computes_it(monkeypatch, device, has_bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)
    assert PrecisionConfig("auto").on(device) == PrecisionConfig(expected)
    assert PrecisionConfig("fp16").on(device) == PrecisionConfig("fp16")


@pytest.mark.parametrize("mode", CUDA_GRAPH_MODES)
def test_cuda_graphs_are_refused_for_several_micro_batches(mode):
    check_cuda_graphs(mode, torch.device("cuda"), micro_batches=1)
    check_cuda_graphs(mode, CPU, micro_batches=4)  # no graphs on a CPU
    check_cuda_graphs("default", torch.device("cuda"), micro_batches=4)
    with pytest.raises(ValueError, match="one micro-batch per step, got 2"):
        check_cuda_graphs(mode, torch.device("cuda"), micro_batches=2)


@pytest.mark.parametrize(
    ("driver", "hidden", "built", "expected"),
    [
        ("NVRM 580", None, "13.0", "for CUDA 13.0, and the driver may be too old"),
        ("NVRM 580", None, None, "without CUDA"),
        ("NVRM 580", "", "13.0", None),
        (None, None, "13.0", None),
    ],
)
def test_gpu_that_torch_cannot_use_is_named(monkeypatch, capsys, driver, hidden, built, expected):
    monkeypatch.setattr(compatibility, "nvidia_driver", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    distributed.warn_of_unused_gpu.cache_clear()
    assert distributed.resolve_device("auto").type == "cpu"
    error = capsys.readouterr().err
    assert (expected or "") in error and ("computing on the CPU" in error) == (expected is not None)
    distributed.warn_of_unused_gpu.cache_clear()
    assert distributed.resolve_device("cpu").type == "cpu" and not capsys.readouterr().err  # as asked for


@pytest.mark.parametrize("name", ["cpu:0", "cuda:", "mps:0", "gpu"])
def test_device_of_a_command_is_refused_as_that_of_a_run(name: str) -> None:
    with pytest.raises(UserError, match=f"device must be auto, cpu, cuda, cuda:<number> or mps, got {name}"):
        distributed.resolve_device(name)
