"""train.compile=auto decides from settings only; the decision is in the header of the log, and compiled programs are
kept between runs.
"""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import config
from torch.fx.experimental import _config as shape_config

from common import paths
from common.errors import Interrupted, TrainingError
from models.decoder import Decoder
from runner.checkpoint.compatibility import code_fingerprint
from runner.engine import loop
from runner.engine.device.compile import BREAK_EVEN_FLOPS, resolve_compile_mode, set_inductor_cache
from runner.engine.loop import train
from runner.engine.open_logs import run_summary

CPU = torch.device("cpu")
DENSE, EXPERTS = config(), config(num_experts=2, moe_intermediate_size=32)


@pytest.fixture(autouse=True)
def unset_cache_dir(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that the value that a run sets is removed after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_compile_auto_compiles_long_runs_only(make_run):
    short, long = (
        make_run("pretrain", "train.compile=auto"),
        make_run("pretrain", "train.compile=auto", "train.max_steps=10000000", folder="long"),
    )
    assert short.compile_decision.mode == "off" and run_summary(short)["compile"].startswith("off (auto: ")
    assert long.compile_decision.mode == "default" and run_summary(long)["compile"].startswith("default (auto: ")
    assert "forward" not in vars(short.model.layers[0]) and "forward" in vars(long.model.layers[0])


@pytest.mark.slow
def test_compile_auto_decides_the_same_for_a_resumed_run(make_run):
    overrides = ["train.compile=auto", "train.max_steps=12", "train.save_every=6"]
    train(first := make_run("pretrain", *overrides))
    assert make_run("pretrain", *overrides, attempt=2).compile_decision == first.compile_decision


def test_short_run_that_is_continued_as_a_long_one_is_compiled(make_run):
    """That it is not exact follows from the changed fact; train.compile=off keeps it so."""
    train(make_run("pretrain", "train.compile=auto", "train.max_steps=2", "train.save_every=2"))
    resumed = make_run("pretrain", "train.compile=auto", "train.max_steps=10000000", attempt=2)
    assert "forward" in vars(resumed.model.layers[0]) and resumed.compatibility["environment.compiled"] == "default"


@pytest.mark.slow
def test_one_program_serves_rows_as_long_as_the_model_is_wide(monkeypatch):
    """A resumed run may begin with rows of another length than the run: it would have computed by another program."""
    monkeypatch.setattr(shape_config, "use_duck_shape", True)  # torch's default
    model, programs = Decoder(config(vocab_size=300, hidden_size=64)).train(), []
    model.compile_layers(single_row=False, backend=lambda graph, _: programs.append(graph) or graph.forward)
    for tokens in (64, 56, 64, 48):
        ids = torch.zeros(3, tokens, dtype=torch.long)
        model(ids, ids, lengths=torch.full((3,), tokens))
    assert len(programs) == 1


def test_compile_cache_is_not_below_data_cache_unless_the_user_sets_it(make_run, tmp_path, monkeypatch):
    """Its programs are executed, and the config may be that of an unknown run directory."""
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path / "checkout")
    make_run("pretrain", "train.compile=default", f"data.cache={tmp_path / 'strange'}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "checkout" / ".cache" / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    make_run("pretrain", "train.compile=default")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "other")


@pytest.mark.parametrize("name", [".cache", ".cache/compiled"])
@pytest.mark.parametrize("kind", [0o777, 0o770, "link"])
def test_compile_cache_that_another_user_may_write_is_not_used(tmp_path, monkeypatch, capsys, kind, name):
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    folder, shared = tmp_path / ".cache" / "compiled", tmp_path / name
    (tmp_path / "other").mkdir()
    if kind == "link":
        shared.parent.mkdir(exist_ok=True)
        shared.symlink_to(tmp_path / "other")
    else:
        folder.mkdir(parents=True)
        shared.chmod(kind)
    set_inductor_cache()
    used = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert used != str(folder) and os.stat(used).st_mode & 0o077 == 0 and os.listdir(used) == []
    assert f"chmod go-w {shared}" in capsys.readouterr().err


def test_compile_cache_is_private_whatever_the_umask(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    before = os.umask(0o002)
    try:
        assert set_inductor_cache() == tmp_path / ".cache" / "compiled"
    finally:
        os.umask(before)
    assert (tmp_path / ".cache" / "compiled").stat().st_mode & 0o777 == 0o700 and capsys.readouterr().err == ""


@pytest.mark.parametrize("mode", ["off", "default", "max-autotune"])
def test_compile_mode_of_the_user_is_not_changed(mode):
    assert resolve_compile_mode(mode, 0.0, CPU, 2, DENSE, False).mode == mode


def test_compile_auto_is_off_where_it_is_slower_or_has_no_compiler(monkeypatch):
    assert resolve_compile_mode("auto", 1e30, CPU, 2, EXPERTS, False).mode == "off"
    assert resolve_compile_mode("auto", 1e30, CPU, 2, DENSE, False).mode == "default"
    dropping = [
        resolve_compile_mode("auto", 1e30, CPU, 2, config(dropout=0.1), packed).mode for packed in (True, False)
    ]
    assert dropping == ["off", "default"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert resolve_compile_mode("auto", 1e30, CPU, 2, DENSE, False).mode == "off"


@pytest.mark.parametrize("cache", [None, "mine"])
def test_compiler_with_arguments_is_one_for_torch_too(cache, tmp_path, monkeypatch):
    """CXX="g++ -O2" was no compiler: `auto` trained without compiled layers, `default` failed."""
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    if cache is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiler = tmp_path / "my g++"
    compiler.write_text('#!/bin/sh\necho "$@"\n')
    compiler.chmod(0o755)
    for command, arguments in ((str(compiler), "-c x"), ("echo -O2 -g", "-O2 -g -c x")):
        monkeypatch.setenv("CXX", command)
        assert resolve_compile_mode("auto", 1e30, CPU, 2, DENSE, False).mode == "default"
        for _ in range(2):
            set_inductor_cache()
        run = {"check": True, "capture_output": True, "text": True, "cwd": "/"}
        printed = subprocess.run([os.environ["CXX"], "-c", "x"], **run)
        assert printed.stdout.strip() == arguments
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert resolve_compile_mode("auto", 1e30, CPU, 2, DENSE, False).mode == "off"


def test_compiled_programs_that_are_incomplete_are_removed(tmp_path, monkeypatch):
    """A run that was killed while it compiled made every later one fail: torch loads what is in its cache."""
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    folder = tmp_path / ".cache" / "compiled"
    (folder / "ab").mkdir(parents=True), (folder / "locks").mkdir()
    whole = Path(torch._C.__file__).read_bytes()
    contents = {
        "whole": whole,
        "cut": whole[: len(whole) // 2],
        "header": whole[:40],
        "empty": b"",
        "unwritten": bytes(5000),
        "locked": whole[: len(whole) // 2],
        "other": b"\xcf\xfa" + bytes(100),
    }
    for name, content in contents.items():
        (folder / "ab" / f"{name}.main.so").write_bytes(content)
        (folder / "locks" / f"{name}.lock").touch()
    with (folder / "locks" / "locked.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        set_inductor_cache()
    assert sorted(path.name for path in (folder / "ab").iterdir()) == [
        "locked.main.so",
        "other.main.so",
        "whole.main.so",
    ]


def fail_to_compile(*args):
    from torch._inductor.exc import CppCompileError

    raise CppCompileError(["g++", "-O3"], "main.cpp:1:\nmain.cpp:7:3: error: killed")


def test_compile_error_names_its_cause_and_the_way_without_it(make_run, monkeypatch):
    monkeypatch.setattr(loop, "train_steps", fail_to_compile)
    with pytest.raises(
        TrainingError, match=r"^torch.compile failed: main.cpp:7:3: error: killed; train without it: train.compile=off$"
    ):
        train(make_run("pretrain"))


def test_stop_signal_that_also_ends_the_compiler_interrupts_the_run(make_run, monkeypatch):
    """A batch system signals every process of a job."""
    requested = [False]

    def stop_while_compiling(state):
        requested[0] = True
        fail_to_compile()

    monkeypatch.setattr(loop, "train_steps", stop_while_compiling)
    with pytest.raises(Interrupted):
        train(make_run("pretrain"), lambda: requested[0])


def test_compiled_programs_are_those_of_this_code(make_run, monkeypatch):
    config = torch.compiler.config
    before, config.cache_key_tag = getattr(config, "cache_key_tag", ""), ""
    monkeypatch.delenv("TORCH_COMPILE_CACHE_KEY_TAG", raising=False)
    try:
        make_run("pretrain", "train.compile=default")
        assert config.cache_key_tag == code_fingerprint()
    finally:
        config.cache_key_tag = before  # monkeypatch may delete it, and torch then compiles nothing


TAG_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
import torch
from runner.engine.device.compile import tag_compiled_programs

tag_compiled_programs("code")
with ThreadPoolExecutor(1) as threads:
    print(threads.submit(lambda: torch.compiler.config.cache_key_tag).result(), torch.compiler.config.cache_key_tag, sep=", ")
"""


@pytest.mark.slow
def test_tag_of_compiled_programs_holds_in_other_threads():
    """Autograd compiles and finds the backward pass of a GPU in threads of its own.

    In a process of its own: other tests change settings of torch.
    """
    env = {**os.environ, "TORCH_COMPILE_CACHE_KEY_TAG": "user"}
    done = subprocess.run(
        [sys.executable, "-c", TAG_IN_THREADS], capture_output=True, text=True, cwd=paths.REPO_ROOT, env=env
    )
    assert done.stdout == "user code, user code\n", done.stderr


GRADIENTS_OF_AN_OPERATOR = """
import torch
from models.layers.ops import custom_op
from runner.engine.device.compile import tag_compiled_programs

@custom_op("stale_test::double")
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@custom_op("stale_test::triple")
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3

for name in ("double", "triple"):
    torch.library.register_fake(f"stale_test::{name}", lambda x: torch.empty_like(x))
torch.library.register_autograd("stale_test::double", lambda ctx, g: backward(g), setup_context=lambda ctx, inputs, output: None)
for backward, tag in ((double, "before"), (triple, "after"), (double, "after")):
    torch.compiler.reset()
    tag_compiled_programs(tag)
    x = torch.ones(4, requires_grad=True)
    torch.compile(double)(x).backward(torch.ones(4))
    print(x.grad[0].item())
"""


@pytest.mark.slow
def test_program_kept_by_older_code_does_not_compute_the_gradients(tmp_path):
    """torch finds kept programs by their forward pass: without the tag the second program has the gradient of the
    first. Its programs call operators only: nothing is left for g++, which would take half a minute.
    """
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", GRADIENTS_OF_AN_OPERATOR]
    gradients = subprocess.run(
        command, cwd=paths.REPO_ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    assert gradients == ["2.0", "3.0", "3.0"]  # the third: programs of the same code are kept


def test_compile_auto_needs_longer_runs_with_more_threads():
    modes = [
        resolve_compile_mode("auto", 1.5 * BREAK_EVEN_FLOPS["cpu"], CPU, threads, DENSE, False).mode
        for threads in (1, 2)
    ]
    assert modes == ["default", "off"]
