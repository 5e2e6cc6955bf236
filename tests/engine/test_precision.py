"""Which device computes in which precision, and that fp32 means fp32. No GPU is needed: what one would say of itself is given."""

import pytest
import torch

from runner.engine.device import compile
from runner.engine.device.precision import Precision, PrecisionConfig


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA device that answers what is asked of it before anything is computed."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return make


@pytest.fixture(autouse=True)
def as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name, enough, too_little, instead", [("tf32", (8, 0), (7, 5), "fp32")])
def test_what_a_device_does_not_compute_in_is_refused_before_anything_is_built(gpu, name, enough, too_little, instead):
    assert Precision(PrecisionConfig(name), gpu(enough)).name == name
    for device, called in ((gpu(too_little), "a GPU"), (torch.device("cpu"), "the CPU")):
        with pytest.raises(ValueError) as refusal:
            Precision(PrecisionConfig(name), device)
        assert refusal.value.args[1:] == (f"precision={name} on {called}", f"use precision={instead}; what was begun in {name} goes on on such a GPU")


def test_an_amd_gpu_is_not_taken_for_an_nvidia_one(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="NVIDIA"):
        Precision(PrecisionConfig("tf32"), gpu((9, 4)))


def test_fp32_is_fp32_whatever_was_set_before_and_tf32_is_asked_for(gpu):
    torch.set_float32_matmul_precision("high")
    assert not Precision(PrecisionConfig("fp32"), torch.device("cpu")).autocast()._enabled
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    tf32 = Precision(PrecisionConfig("tf32"), gpu((9, 0)))
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cuda.matmul.allow_tf32 and tf32.dtype == torch.float32
    Precision(PrecisionConfig("bf16"), torch.device("cpu"))
    assert not torch.backends.cuda.matmul.allow_tf32


def test_cuda_graphs_and_gradients_that_are_added_up_do_not_go_together():
    for word in compile.CUDA_GRAPH_MODES:
        compile.check_cuda_graphs(word, torch.device("cuda"), batches=1)
        compile.check_cuda_graphs(word, torch.device("cpu"), batches=4)  # there it records none
        with pytest.raises(ValueError, match="several micro-batches"):
            compile.check_cuda_graphs(word, torch.device("cuda"), batches=2)
    compile.check_cuda_graphs("default", torch.device("cuda"), batches=4)
