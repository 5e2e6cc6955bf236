"""Benchmarks are run by hand; here: that each starts, and what decides which cases run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted(file.name for file in (ROOT / "benchmarks").glob("*.py"))


@pytest.fixture
def import_benchmark(monkeypatch: pytest.MonkeyPatch):
    """Import a benchmark, or a library, by the name that its scripts use; its modules are forgotten after the test."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[name]


def run_benchmark(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / name), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmarks_and_libraries_import_without_torch_and_state_their_command():
    names = [*(name.removesuffix(".py") for name in BENCHMARKS), "lib.case_process"]
    code = f"import sys, {', '.join(names)}\nprint('torch' in sys.modules, *[n for n in {names!r} if 'python' not in sys.modules[n].__doc__])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_help_lists_its_arguments(name: str):
    assert "--write" in run_benchmark(name, "--help")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_without_a_gpu_prints_one_line(import_benchmark, capsys):
    import_benchmark("gpu").main(SimpleNamespace(device="cuda"))
    assert capsys.readouterr().out.count("\n") == 1


def test_gpu_benchmark_runs_the_cases_that_the_gpu_computes_and_holds(import_benchmark, monkeypatch):
    gpu: ModuleType = import_benchmark("gpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80e9))
    names = [name for name in gpu.CASES if gpu.why_left_out(name, "cuda") is None]
    assert names == ["fp32", "tf32", "bf16 plain", "bf16", "bf16 graphs"]
    spec = {"device": "cuda", "parameters": 26e6, "rows": 8, "length": 1024, "model": {"num_hidden_layers": 8, "hidden_size": 512}}
    assert gpu.simultaneous_cases(names, spec) == [names]
    assert gpu.simultaneous_cases(names, spec | {"parameters": 1e9}) == [[name] for name in names]


@pytest.mark.slow
def test_gpu_benchmark_measures_a_step_on_the_cpu():
    arguments = "--device cpu --models tiny --length 64 --rounds 1 --steps-per-turn 2 --cases".split()
    output = run_benchmark("gpu.py", *arguments, "bf16 plain+tf32+bf16 graphs")
    rows = [line for line in output.splitlines() if line.startswith("| bf16 plain |")]
    assert len(rows) == 1 and "TFLOP/s" in rows[0]
    assert [line.split(":")[1].strip() for line in output.splitlines() if line.startswith("left out")] == ["tf32", "bf16 graphs"]
    assert "failed" not in output
