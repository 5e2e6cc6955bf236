"""Which of several GPUs a run, a rank and a job of a sweep use, on a machine that only pretends to have them."""

import os
from types import SimpleNamespace

import pytest
import torch
from engine_fixtures import composed, stage_overrides

from common.errors import UserError
from runner.engine.device.distributed import RENDEZVOUS_ENV, init_distributed, resolve_device
from runner.launch.local_ranks import count_local_ranks
from runner.planning.facts import this_machine
from runner.sweep.backends import make_slots

SINGLE = SimpleNamespace(name="single", check_device=lambda kind: None, check_shares=lambda ranks: None)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs; what was made the current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (number, 10 + number))
    return current


@pytest.mark.parametrize(
    ("device", "used", "current"),
    [("auto", "cuda", []), ("cuda", "cuda", []), ("cuda:0", "cuda:0", ["cuda:0"]), ("cuda:1", "cuda:1", ["cuda:1"])],
)
def test_gpu_of_a_run_is_the_current_one(gpus, device, used, current):
    """Pinned memory, random states and peaks of memory are of the current GPU."""
    assert str(init_distributed(SINGLE, device).device) == used and gpus == current


def test_each_rank_has_a_gpu_of_its_own(gpus, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name, value in (("RANK", "3"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "4"), (RENDEZVOUS_ENV, "file:///meeting")):
        monkeypatch.setenv(name, value)
    assert str(init_distributed(SINGLE, "cuda").device) == "cuda:1" and gpus == ["cuda:1"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"finds 2 CUDA devices, this process needs number 2") as error:
        init_distributed(SINGLE, "auto")
    assert error.value.fix == "distributed.nproc=2"
    with pytest.raises(UserError, match="names one GPU, but the run has several ranks"):
        resolve_device("cuda:1", local_rank=0)


@pytest.mark.parametrize(("device", "ranks"), [("auto", 2), ("cuda", 2), ("cpu", 1)])
def test_ranks_are_as_many_as_visible_gpus(gpus, device, ranks):
    overrides = ["distributed=ddp", "distributed.nproc=auto", f"device={device}", "data.path=none"]
    assert count_local_ranks(composed(*stage_overrides("pretrain"), *overrides)) == ranks


@pytest.mark.parametrize(("device", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_plan_reads_the_memory_of_the_gpu_of_the_run(gpus, device, number):
    machine = this_machine(device)
    assert (machine.device, machine.device_name) == ("cuda", f"GPU {number}")
    assert (machine.available, machine.memory) == (number, 10 + number)


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        (None, [0, 1], ["0", "1"]),
        ("4,5", [0, 1], ["4", "5"]),
        ("5,4", [1], ["4"]),
        ("GPU-aa,3", [1, 0], ["3", "GPU-aa"]),
        (None, ["MIG-1-2", "MIG-1-3"], ["MIG-1-2", "MIG-1-3"]),
        ("MIG-1-2,MIG-1-3", [0, 1], ["MIG-1-2", "MIG-1-3"]),  # a process sees one instance only
        ("MIG-GPU-aa/1/0,MIG-GPU-aa/2/0", [1], ["MIG-GPU-aa/2/0"]),
    ],
)
def test_job_of_a_sweep_has_a_gpu_that_the_sweep_may_use(monkeypatch, visible, devices, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(None, devices)] == expected
