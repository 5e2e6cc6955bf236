"""train.compile=auto decides from settings only; the decision is in the header of the log, and compiled programs are kept between runs."""

import os

import pytest
import torch

from common import paths
from runner.engine.build import run_summary
from runner.engine.device.compile import resolve_compile_mode, set_inductor_cache
from runner.engine.loop import train

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def unset_cache_dir(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that the value that a run sets is removed after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_compile_auto_compiles_long_runs_only(make_run):
    short, long = make_run("pretrain", "train.compile=auto"), make_run("pretrain", "train.compile=auto", "train.max_steps=10000000", folder="long")
    assert short.compile_decision.mode == "off" and run_summary(short)["compile"].startswith("off (auto: ")
    assert long.compile_decision.mode == "default" and run_summary(long)["compile"].startswith("default (auto: ")
    assert short.model.layers[0].compiled is None and long.model.layers[0].compiled is not None


def test_compile_auto_decides_the_same_for_a_resumed_run(make_run):
    overrides = ["train.compile=auto", "train.max_steps=12", "train.save_every=6"]
    train(first := make_run("pretrain", *overrides))
    assert make_run("pretrain", *overrides, attempt=2).compile_decision == first.compile_decision


def test_compile_cache_is_not_below_the_cache_that_a_config_names_unless_the_user_sets_it(make_run, tmp_path, monkeypatch):
    """Its programs are executed, and the config may be that of an unknown run directory."""
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path / "checkout")
    make_run("pretrain", "train.compile=default", f"data.cache={tmp_path / 'strange'}")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "checkout" / ".cache" / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
    make_run("pretrain", "train.compile=default")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "other")


@pytest.mark.parametrize("kind", ["world writable", "link"])
def test_compile_cache_that_another_user_may_write_is_not_used(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(paths, "REPO_ROOT", tmp_path)
    folder = tmp_path / ".cache" / "compiled"
    folder.parent.mkdir()
    if kind == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    set_inductor_cache()
    used = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert used != str(folder) and os.stat(used).st_mode & 0o077 == 0 and os.listdir(used) == []


@pytest.mark.parametrize("mode", ["off", "default", "max-autotune"])
def test_compile_mode_of_the_user_is_not_changed(mode):
    assert resolve_compile_mode(mode, 0.0, CPU, threads=2, has_experts=False).mode == mode


def test_compile_auto_is_off_with_experts_or_without_a_compiler(monkeypatch):
    assert resolve_compile_mode("auto", 1e30, CPU, threads=2, has_experts=True).mode == "off"
    assert resolve_compile_mode("auto", 1e30, CPU, threads=2, has_experts=False).mode == "default"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert resolve_compile_mode("auto", 1e30, CPU, threads=2, has_experts=False).mode == "off"
