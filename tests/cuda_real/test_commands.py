"""Commands on a GPU as they are typed: from pretraining to an exported model, a lack of memory, and signals."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_fixtures import ROOT

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: CI has none, type pytest tests/cuda_real on one"
)
SHORT = [
    "model.hidden_size=64", "model.num_hidden_layers=2", "model.head_dim=32", "train.max_steps=4", "train.batch_size=4", "train.log_every=1", "train.save_every=2",
    "train.eval_every=0", "train.sample_every=0", f"device={DEVICE}",
]  # fmt: skip


def typed(command: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "runner" / f"{command}.py"), *arguments]


def run(command: str, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(typed(command, *arguments), capture_output=True, text=True, timeout=500)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def fields(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_stages_follow_each_other_in_the_precision_of_the_card(tmp_path):
    base = tmp_path / "pretrain"
    assert f"{DEVICE}" in run("train", *SHORT, f"hydra.run.dir={base}")
    expected = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    assert fields(base)["attempts"][-1]["precision"] == expected
    for stage in ("sft", "lora", "dpo"):
        run("train", f"stage={stage}", f"init_from={base}", *SHORT[3:], f"hydra.run.dir={tmp_path / stage}")
        assert fields(tmp_path / stage)["outcome"] == "completed"
    answered = run("chat", f"run={tmp_path / 'sft'}", "prompt=Hello", "max_new_tokens=4", f"device={DEVICE}")
    assert ("computes in bf16" in answered) == (expected == "bf16")
    data = f"data.path={ROOT / 'data' / 'samples' / 'sft_val.jsonl'}"
    run("evaluate", f"run={tmp_path / 'sft'}", data, f"device={DEVICE}")
    run("export", f"run={tmp_path / 'sft'}", "format=hf", f"to={tmp_path / 'exported'}")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_lack_of_memory_ends_with_what_needs_less(tmp_path):
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - (1 << 30), dtype=torch.uint8, device=DEVICE)
    text = run(
        "train", "model=minimind_26m", *SHORT[3:], "train.batch_size=64", f"hydra.run.dir={tmp_path / 'run'}", code=1
    )
    del held
    torch.cuda.empty_cache()
    assert "memory" in text and "train.batch_size=" in text and "Traceback" not in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_run_is_continued_to_the_same_weights(tmp_path, number):
    long = [*SHORT, "train.max_steps=2000", "train.save_every=500"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    run("train", *long, f"hydra.run.dir={whole}")
    command = typed("train", *long, "tracker.console=json", f"hydra.run.dir={folder}")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as child:
        assert child.stdout is not None
        next(line for line in child.stdout if '"step": 20' in line)  # any later one would do, too
        child.send_signal(number)
        child.stdout.read()
    assert child.returncode == 75 and 20 <= fields(folder)["step"] < 2000
    run("train", f"resume={folder}")
    model = Path("model") / "model.safetensors"
    assert (folder / model).read_bytes() == (whole / model).read_bytes()
