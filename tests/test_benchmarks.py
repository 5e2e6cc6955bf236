"""Benchmarks are run by hand; here only that they can be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


def benchmark(name: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / name), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_says_one_line_and_is_content():
    assert benchmark("gpu.py").count("\n") == 1


def test_a_gpu_gets_the_cases_it_can_compute_and_those_together_that_it_can_hold(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80e9))
    names = [name for name in gpu.CASES if gpu.why_not(name, "cuda") is None]
    assert names == ["fp32", "tf32", "bf16 plain", "bf16", "bf16 graphs"]
    spec = {"device": "cuda", "parameters": 26e6, "lines": 8, "length": 1024, "model": {"num_hidden_layers": 8, "hidden_size": 512}}
    assert gpu.groups(names, spec) == [names]
    assert gpu.groups(names, spec | {"parameters": 1e9}) == [[name] for name in names]


@pytest.mark.parametrize("name", ["kept.py", "turns.py", "speed_cases.py"])
def test_what_benchmarks_share_has_nothing_to_say_by_itself(name):
    assert benchmark(name) == ""


@pytest.mark.slow
def test_the_gpu_benchmark_goes_its_whole_way_on_a_processor():
    told = benchmark("gpu.py", *"--device cpu --models tiny --length 64 --rounds 1 --stretch 2 --cases".split(), "bf16 plain+tf32+bf16 graphs+fp8")
    rows = [line for line in told.splitlines() if line.startswith("| bf16 plain |")]
    assert len(rows) == 1 and "TFLOP/s" in rows[0]
    assert [line.split(":")[1].strip() for line in told.splitlines() if line.startswith("left out")] == ["tf32", "bf16 graphs", "fp8"]
    assert "failed" not in told
