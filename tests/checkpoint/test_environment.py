"""What a resume compares besides settings and data: every fact that may change a bit is named when it alone has
changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from common.errors import Interrupted
from common.paths import REPO_ROOT
from runner.checkpoint import compatibility
from runner.checkpoint.compatibility import (
    code_fingerprint,
    describe_environment,
    diff_facts,
    environment_facts,
    numeric_variables,
    nvidia_driver,
    rank_differences,
    recorded_environment,
    run_rules,
    settings_fingerprint,
)
from runner.config.compose import compose_config
from runner.engine.device.compile import CompileDecision
from runner.engine.kernels import RunKernels, kernel_facts
from runner.engine.loop import train
from runner.engine.verify_resume import diff_run_dirs

CPU = torch.device("cpu")
RULES = {"environment": "changes_rounding", "written_by": "ignored"}


def reasons(saved: dict, current: dict) -> list[str]:
    return diff_facts(saved, current, RULES)["changes_rounding"]


def test_environment_of_a_gpu_names_driver_and_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(compatibility, "nvidia_driver", lambda: "driver 1")
    before = environment_facts(describe_environment(torch.device("cuda"), 1))
    monkeypatch.setattr(compatibility, "nvidia_driver", lambda: "driver 2")
    after = environment_facts(describe_environment(torch.device("cuda"), 1))
    assert reasons(before, after) == ["environment.driver: driver 1 -> driver 2"]
    monkeypatch.setattr(compatibility, "find_spec", lambda name: name)
    monkeypatch.setattr(compatibility, "version", lambda name: f"{name} 3.8")
    facts = recorded_environment(environment_facts(describe_environment(torch.device("cuda"), 1)))
    assert facts["triton"] == "triton 3.8"
    (file := tmp_path / "version").write_text("NVRM version: 580.159.04\nGCC version: 12\n")
    assert nvidia_driver(file) == "NVRM version: 580.159.04" and nvidia_driver(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("threads", lambda patch: patch.setattr(torch, "get_num_threads", lambda: 31)),
        ("cpu", lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")),
        ("cpu_model", lambda patch: patch.setattr(compatibility, "cpu_model", lambda: "another 01234567")),
        ("torch", lambda patch: patch.setattr(torch, "__version__", "9.0")),
        ("torch_build", lambda patch: patch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open")),
        ("numpy", lambda patch: patch.setattr("numpy.__version__", "9.0")),
        ("python", lambda patch: patch.setattr("platform.python_version", lambda: "4.0.0")),
        ("mkldnn", lambda patch: patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)),
        ("deterministic", lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)),
        ("variables.ONEDNN_MAX_CPU_ISA", lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")),
        ("variables.MKL_CBWR", lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE")),
    ],
)
def test_environment_names_the_one_fact_that_changed(monkeypatch: pytest.MonkeyPatch, name: str, change) -> None:
    before = environment_facts(describe_environment(CPU, 1))
    assert reasons(before, environment_facts(describe_environment(CPU, 1))) == []
    change(monkeypatch)
    after = environment_facts(describe_environment(CPU, 1))
    assert reasons(before, after) == [
        f"environment.{name}: {before.get(f'environment.{name}')} -> {after[f'environment.{name}']}"
    ]


def test_environment_has_the_number_of_ranks_also_of_one() -> None:
    one, two = (environment_facts(describe_environment(CPU, ranks)) for ranks in (1, 2))
    assert reasons(one, two) == ["environment.ranks: 1 -> 2"]


def test_environment_of_a_gpu_names_device_and_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    facts = describe_environment(torch.device("cuda"), 1)
    assert [facts[name] for name in ("device", "cuda", "cudnn", "cudnn_benchmark")] == [
        "NVIDIA A100",
        "12.8",
        91000,
        False,
    ]


def test_kernels_are_facts_of_a_run(make_run) -> None:
    state = make_run("pretrain")
    compatibility = recorded_environment(state.compatibility)
    assert [compatibility[name] for name in ("compiled", "logits_per_chunk", "saved_attention_probs", "ranks")] == [
        "off",
        1 << 22,
        1 << 24,
        1,
    ]
    compiled = kernel_facts(state.model, CPU, RunKernels({}, {}, CompileDecision("default", "")))
    assert "compiler" not in compatibility and "compiler" in recorded_environment(compiled)


def test_variables_without_influence_on_the_result_are_not_compared() -> None:
    given = {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "NCCL_DEBUG": "INFO",
        "HOME": "/root",
        "KMP_DETERMINISTIC_REDUCTION": "1",
    }
    assert numeric_variables(given) == {"KMP_DETERMINISTIC_REDUCTION": "1"}


def test_rank_on_another_machine_is_named() -> None:
    assert rank_differences(
        [{"cpu": "AVX2", "threads": 4}, {"cpu": "AVX2", "threads": 4}, {"cpu": "AVX512", "threads": 4}]
    ) == {"rank2.cpu": "AVX512"}


def test_code_fingerprint_changes_with_a_file_of_training_only(tmp_path: Path) -> None:
    for folder in (*compatibility.TRAINING_CODE, "docs"):
        shutil.copytree(REPO_ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "samples"))
    fingerprint = code_fingerprint.__wrapped__
    before = fingerprint(tmp_path)
    assert before == fingerprint(REPO_ROOT)
    (tmp_path / "docs" / "README.md").write_text("another text")
    (tmp_path / "runner" / "train.py").write_text("# a command")
    assert fingerprint(tmp_path) == before
    for change in (
        lambda: (tmp_path / "models" / "layers" / "mlp.py").open("a").write("# edited\n"),
        lambda: (tmp_path / "data" / "new.py").write_text(""),
        lambda: (tmp_path / "models" / "lora.py").rename(tmp_path / "models" / "adapters.py"),
    ):
        change()
        assert fingerprint(tmp_path) != before
        before = fingerprint(tmp_path)


def test_code_change_is_named_by_its_commits_or_by_its_content() -> None:
    code = {"environment.code": "a" * 64}, {"environment.code": "b" * 64}
    first, second = {"written_by.commit": "1" * 40}, {"written_by.commit": "2" * 40}
    assert reasons(code[0] | first, code[1] | second) == ["code changed: 111111111111 -> 222222222222"]
    assert reasons(code[0] | first, code[1] | first) == [
        "code changed: aaaaaaaaaaaa -> bbbbbbbbbbbb (uncommitted changes to 111111111111)"
    ]
    assert reasons(code[0], code[1] | second) == ["code changed: aaaaaaaaaaaa -> bbbbbbbbbbbb"]
    assert reasons(code[0] | first, code[0] | second) == []  # e.g. a commit that changes documentation


def test_settings_fingerprint_ignores_what_no_number_depends_on() -> None:
    config = compose_config(["stage=pretrain"])
    before = settings_fingerprint(config)
    config.train.save_every += 1
    assert settings_fingerprint(config) == before and run_rules(config)["written_by"] == "ignored"
    config.seed += 1
    assert settings_fingerprint(config) != before


def stop_at(make_run, step: int, **options):
    state = make_run("pretrain", "train.max_steps=6", **options)
    with pytest.raises(Interrupted):
        train(state, lambda: state.progress.step == step)
    return state


@pytest.mark.slow
def test_resume_in_the_same_environment_is_exact_and_bitwise_equal(make_run, tmp_path: Path) -> None:
    train(make_run("pretrain", "train.max_steps=6", folder="uninterrupted"))
    stop_at(make_run, 3)
    state = make_run("pretrain", "train.max_steps=6")
    train(state)
    assert state.metadata.fields["exact"] and state.metadata.fields["inexact_because"] == []
    assert diff_run_dirs(tmp_path / "uninterrupted", state.run_dir) == []


def test_resume_with_changed_code_is_inexact_and_named_before_the_first_step(
    make_run, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(make_run, 3)
    monkeypatch.setattr(compatibility, "code_fingerprint", lambda: "d" * 64)
    state = make_run("pretrain", "train.max_steps=6")
    train(state)
    assert state.metadata.fields["exact"] is False and [
        reason[:13] for reason in state.metadata.fields["inexact_because"]
    ] == ["code changed:"]
    log = (state.run_dir / "train.log").read_text()
    assert "code changed:" in log[: log.index("step 4/6")]
