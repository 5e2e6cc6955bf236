"""train.compile=auto: a function of the words, said in the header, with its programs kept between runs."""

import os

import pytest
import torch

from runner.engine.device import compile
from runner.engine.loop import train
from runner.engine.run_summary import run_summary


@pytest.fixture(autouse=True)
def own_place(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that whatever a test leaves there is taken back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_a_short_run_is_not_compiled_and_a_long_one_is(make_run):
    short, long = make_run("pretrain", "train.compile=auto"), make_run("pretrain", "train.compile=auto", "train.max_steps=10000000", folder="long")
    assert short.compile_decision.mode == "off" and "compile off (auto: " in run_summary(short)["computes"]
    assert long.compile_decision.mode == "default" and "compile default (auto: " in run_summary(long)["computes"]
    assert short.model.model.layers[0].compiled is None and long.model.model.layers[0].compiled is not None


def test_the_decision_does_not_look_at_where_the_run_stands(make_run):
    words = ["train.compile=auto", "train.max_steps=12", "train.save_every=6"]
    first = make_run("pretrain", *words)
    train(first)
    assert make_run("pretrain", *words, attempt=2).compiling == first.compile_decision


def test_programs_are_kept_beside_the_token_stores_unless_the_user_has_a_place(make_run, tmp_path, monkeypatch):
    make_run("pretrain", "train.compile=default")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    make_run("pretrain", "train.compile=default")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "elsewhere")


def test_what_the_user_says_is_done_and_experts_are_left_alone():
    device = torch.device("cpu")
    for word in ("off", "default", "max-autotune"):
        assert compile.resolve_compile_mode(word, 0.0, device, threads=2, experts=False).mode == word
    assert compile.resolve_compile_mode("auto", 1e30, device, threads=2, experts=True).mode == "off"


def test_without_a_compiler_auto_compiles_nothing(monkeypatch):
    assert compile.resolve_compile_mode("auto", 1e30, torch.device("cpu"), threads=2, experts=False).mode == "default"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compile.resolve_compile_mode("auto", 1e30, torch.device("cpu"), threads=2, experts=False).mode == "off"
