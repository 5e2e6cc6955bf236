"""Benchmarks are run by hand; here: that each starts, and what decides which cases run."""

from __future__ import annotations

import importlib
import os
import shutil
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


def test_benchmarks_import_without_torch_and_state_their_command():
    names = [*(name.removesuffix(".py") for name in BENCHMARKS), "lib.case_process"]
    code = f"import sys, {', '.join(names)}\nprint('torch' in sys.modules, *[n for n in {names!r} if 'python' not in sys.modules[n].__doc__])"
    env = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


HELP_OF_ALL = """
import contextlib, runpy, sys
for sys.argv in [[file, "--help"] for file in sys.argv[1:]]:
    sys.path[0] = sys.argv[0].rpartition("/")[0]
    with contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_benchmark_help_lists_its_arguments():
    files = [str(ROOT / "benchmarks" / name) for name in BENCHMARKS]
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ["--write" in text for text in done.stdout.split("usage: ")] == [False, *[True] * len(files)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_without_a_gpu_prints_one_line(import_benchmark, capsys):
    import_benchmark("gpu").main(SimpleNamespace(device="cuda"))
    assert capsys.readouterr().out.count("\n") == 1


def test_gpu_benchmark_runs_the_cases_that_the_gpu_computes_and_holds(import_benchmark, monkeypatch):
    gpu: ModuleType = import_benchmark("gpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "NVIDIA A100-SXM4-80GB")
    args = SimpleNamespace(device="cuda", litgpt=None, nanochat=None)
    names = [name for name, (case, *_) in gpu.CASES.items() if case == "ours" and gpu.why_left_out(name, args) is None]
    assert gpu.nominal_flops("bf16") == 312e12 and gpu.nominal_flops("fp32") is None
    assert gpu.why_left_out("litgpt, compiled", args) == "no checkout given: --litgpt PATH"
    assert names == ["fp32", "tf32", "bf16 plain", "bf16", "bf16 graphs"]
    spec = {
        "device": "cuda",
        "parameters": 26e6,
        "rows": 8,
        "length": 1024,
        "model": {"num_hidden_layers": 8, "hidden_size": 512},
    }
    assert gpu.simultaneous_cases(names, spec) == [names]
    assert gpu.simultaneous_cases(names, spec | {"parameters": 1e9}) == [[name] for name in names]


@pytest.mark.slow(long=True)
def test_gpu_benchmark_measures_a_step_on_the_cpu():
    arguments = "--device cpu --models tiny --tokens 128 --length 64 --rounds 2 --minutes 0 --steps-per-turn 2 --profile --cases".split()
    output = run_benchmark("gpu.py", *arguments, "bf16 plain+tf32+bf16 graphs")
    assert "tiny, 1,607,040 parameters, 2 x 64" in output and "1 of 2 rounds: the time was over" in output
    assert "- bf16 plain: aten::" in output
    rows = [line for line in output.splitlines() if line.startswith("| bf16 plain |")]
    assert len(rows) == 1 and "TFLOP/s" in rows[0]
    assert [line.split(":")[1].strip() for line in output.splitlines() if line.startswith("left out")] == [
        "tf32",
        "bf16 graphs",
    ]
    assert "failed" not in output


def test_benchmark_thread_settings_replace_those_of_the_user(import_benchmark):
    environment: ModuleType = import_benchmark("lib.environment")
    own = {"PATH": "/bin", "OMP_WAIT_POLICY": "active", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    settings = environment.thread_settings(own)
    assert "OMP_WAIT_POLICY=active" not in settings and "threads unset" in settings
    assert environment.with_setting(own, None) == own
    assert environment.with_setting(own, settings["spin 1 ms"]) == {
        "PATH": "/bin",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        **settings["spin 1 ms"],
    }
    assert environment.recorded_variables(own) == {"OMP_WAIT_POLICY": "active", "ONEDNN_MAX_CPU_ISA": "AVX2"}


class FakeCase:
    """Turns of a case whose process computes `speed` tokens per second; 0: it fails."""

    name, precision = "case", "bf16"

    def __init__(self, speed: float, setting: str) -> None:
        self.speed, self.setting, self.steps = speed, setting, list[dict]()

    def step(self) -> dict:
        self.steps.append({"computed": self.speed, "seconds": 1.0} if self.speed else {"error": "failed"})
        return self.steps[-1]


@pytest.mark.parametrize(("speed", "expected"), [(1.2, True), (1.005, False), (0.5, False), (0, False)])
def test_benchmark_takes_another_thread_setting_only_if_it_is_faster(import_benchmark, speed: float, expected: bool):
    challenger, best = FakeCase(speed, "other"), FakeCase(1.0, "own")
    assert import_benchmark("lib.interleave").is_better(challenger, best) is expected
    assert challenger.steps == best.steps == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the state of a process is read from /proc")
def test_benchmark_case_has_the_users_environment_and_stops_between_turns(import_benchmark, monkeypatch):
    interleave: ModuleType = import_benchmark("lib.interleave")
    monkeypatch.setattr(interleave, "ENVIRONMENT", dict(os.environ) | {"OMP_WAIT_POLICY": "active"})
    script = "import json, os, sys\nfor line in sys.stdin: print(json.dumps({'policy': os.environ.get('OMP_WAIT_POLICY')}), flush=True)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **settings: popen([sys.executable, "-c", script], **settings)
    )
    for variables, policy in ((None, "active"), ({}, None)):
        case = interleave.CaseProcess("case", {"precision": "bf16"}, "setting", variables)
        try:
            assert case.facts == {"policy": policy}
            assert Path(f"/proc/{case.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            assert case.step() == {"policy": policy}
        finally:
            case.close()
        assert case.process.returncode == 0


def speed_numbers(machine: str, other: float, best: float = 0.0, **limits: str) -> dict:
    ours = {"case": "ours, packed, compiled", "precision": "bf16", "share_of_peak": 0.5, "useful_against_first": 1.0}
    cases = [ours, ours | {"case": "HF", "useful_against_first": other}]
    cases += [ours | {"case": "HF", "useful_against_first": best, "setting": "spin"}] if best else []
    facts = {"processor": machine, "cores": 2, "instruction_sets": ["avx2", "amx_bf16"], "variables": limits}
    return facts | {
        "workload": "c4",
        "stage": "pretrain",
        "environments": "own+best" if best else "own",
        "cases": cases,
    }


def test_benchmark_summary_starts_with_the_worst_machine(import_benchmark):
    results = [
        speed_numbers("A", 0.5),
        speed_numbers("Intel(R) B CPU @ 2GHz", 0.8, best=1.25),
        speed_numbers("A", 0.625, ONEDNN_MAX_CPU_ISA="AVX2"),
    ]
    lines = import_benchmark("lib.speed_summary").summary_table(results).splitlines()[2:]
    assert [[line.split(" | ")[at].strip("| ") for at in (0, 3)] for line in lines] == [
        ["Intel B amx 2 cores", "1.25 (best: 0.80)"],
        ["A amx 2 cores as AVX2", "1.60"],
        ["A amx 2 cores", "2.00"],
    ]


@pytest.fixture
def other_checkout(tmp_path: Path) -> Path:
    """A checkout with the names that commits.py uses; its step takes no time, and its first module names the folder."""
    files = {
        "runner/config/compose.py": "compose_tree = to_config = without_hydra = lambda value: value\n",
        "runner/launch/initial_weights.py": "def adopt_model(tree, overrides): ...\n",
        "runner/engine/build.py": """
from types import SimpleNamespace
import torch

def build_run(cfg, run_dir, **others):
    batch = SimpleNamespace(input_ids=torch.zeros(1, 4), lengths=torch.tensor([4]))
    return SimpleNamespace(pipeline=SimpleNamespace(train=[0]), loader=SimpleNamespace(iter_epoch=lambda epoch: iter([[batch]] * 4)))
""",
        "runner/engine/loop.py": "from types import SimpleNamespace\n\ndef train_step(state, batches, lr):\n    return SimpleNamespace(sums={'loss': 12.5})\n",
    }
    for name, source in files.items():
        file = tmp_path / "base" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        for folder in list(file.relative_to(tmp_path / "base").parents)[:-1]:
            (tmp_path / "base" / folder / "__init__.py").touch()
    return tmp_path / "base"


def commit_spec(checkout: Path) -> dict:
    model = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1}
    spec = {
        "case": "ours",
        "compile": "off",
        "precision": "fp32",
        "overrides": [],
        "rows": 1,
        "parameters": 1,
        "model": model,
    }
    return spec | {"checkout": str(checkout), "record_loss": True, "variables": {"MALLOC_ARENA_MAX": "1"}}


@pytest.mark.slow
def test_benchmark_process_of_another_checkout_imports_its_own_modules(import_benchmark, other_checkout: Path):
    case = import_benchmark("lib.interleave").CaseProcess("base", commit_spec(other_checkout))
    try:
        assert not case.failed, case.steps
        assert case.request("code") == {"folders": [str(other_checkout)]}
        assert [step["loss"] for step in case.first_steps] == [12.5, 12.5]
        assert case.facts["variables"]["MALLOC_ARENA_MAX"] == "1" and case.facts["waiting"] == "the library's"
    finally:
        case.close()


@pytest.mark.slow
def test_benchmark_process_that_imports_other_code_than_its_checkout_fails(
    import_benchmark, other_checkout: Path, tmp_path: Path, monkeypatch
):
    interleave: ModuleType = import_benchmark("lib.interleave")
    variables = {
        "PYTHONPATH": f"{other_checkout}{os.pathsep}{ROOT / 'benchmarks'}",
        "LM_RUNNER_BENCHMARK_CHECKOUT": str(other_checkout),
    }
    monkeypatch.setattr(interleave, "import_variables", lambda checkout: variables)
    (tmp_path / "empty").mkdir()
    case = interleave.CaseProcess("base", commit_spec(tmp_path / "empty"))
    try:
        assert (
            case.failed
            and case.steps[-1]["error"] == f"the process has imported {other_checkout} instead of {tmp_path / 'empty'}"
        )
    finally:
        case.close()


@pytest.mark.slow
def test_benchmark_of_commits_refuses_a_folder_without_the_engine(
    import_benchmark, other_checkout: Path, tmp_path: Path
):
    commits: ModuleType = import_benchmark("commits")
    assert commits.read_checkout(other_checkout)[:2] == (str(other_checkout), "unknown")
    (other_checkout / "runner" / "engine" / "build.py").unlink()
    (other_checkout / "runner" / "engine" / "loop.py").write_text("def step(): ...\n")
    with pytest.raises(
        SystemExit,
        match=f"no runner.engine.build.build_run, runner.engine.loop.train_step; .* {commits.OLDEST}$",
    ):
        commits.read_checkout(other_checkout)
    with pytest.raises(SystemExit, match="with no folder runner/engine"):
        commits.read_checkout(tmp_path)


def test_benchmark_of_commits_finds_the_first_step_that_differs(import_benchmark):
    compare = import_benchmark("commits").compare_losses
    step = {"useful": 4, "computed": 4, "loss": 2.0}
    assert compare([step, step], [step, step]) == "all 2 bitwise equal"
    assert compare([step, step], [step, step | {"loss": 2.0000000000000004}]).startswith(
        "differ from step 2 on, there by 2.2e-16"
    )
    assert compare([step, step], [step | {"computed": 8}, step]) == "other batches from step 1 on"
    assert compare([step | {"loss": float("nan")}], [step]).startswith("differ from step 1")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_peak_of_instructions_and_rates_of_products_are_listed(import_benchmark):
    table = import_benchmark("instruction_peak").table(1, 1000, {"tokens": 64, "outputs": 64, "inputs": 64})
    assert "| multiply-add in fp32 | " in table and "64 tokens, 64 outputs, 64 inputs" in table
    assert all(
        f"| products of a linear layer, {name} | " in table
        for name in ("float32", "bfloat16, in bfloat16", "bfloat16, in float32 and rounded")
    )
