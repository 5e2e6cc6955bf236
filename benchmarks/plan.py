"""Estimates of plan.py against the runs themselves: python benchmarks/plan.py [--write] [--only NAME].

For each configuration: plan.py, then train.py with the same overrides in a temporary folder. Compared are the largest
memory of the training process (ru_maxrss, VmHWM of Linux) and its time, which other load on the machine changes; the
memory does not depend on load. A long run is compiled, has a memory pool and times compiled layers: it is
stopped by SIGTERM after some steps, saves, and is planned after that, without a trial.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import ROOT
from lib.results import report_result, result_parser

SHARED = ["init_from=scratch", "device=cpu"]
SHORT = ["train.max_steps=3"]
LONG = ["train.max_steps=200000", "train.eval_every=0", "train.save_every=0"]
INTERRUPTED = os.EX_TEMPFAIL  # exit code of a run that was stopped and has saved
LONG_STEPS = 3  # of a long run that are waited for
CASES = {
    "tiny, packed": "",
    "tiny, SFT packed, bf16": "stage=sft precision=bf16",
    "tiny, SFT unpacked": "stage=sft data.packing=none train.batch_size=16",
    "tiny, LoRA": "stage=lora",
    "tiny, DPO": "stage=dpo",
    "26m, packed": "model=minimind_26m data.max_length=512 train.batch_size=2 optimizer=adamw",
    "26m, packed, saved in between": "model=minimind_26m data.max_length=512 train.batch_size=2 optimizer=adamw train.save_every=2",
    "26m, SFT unpacked, bf16": "model=minimind_26m stage=sft data.packing=none precision=bf16 train.batch_size=4 optimizer=adamw",
    "26m, LoRA unpacked": "model=minimind_26m stage=lora data.packing=none train.batch_size=4",
    "26m, full checkpointing": "model=minimind_26m data.max_length=512 train.batch_size=4 train.activation_checkpointing=full",
    "64m, packed, bf16": "model=minimind_64m data.max_length=512 train.batch_size=1 precision=bf16",
    "MoE of 4 experts, 2 layers": "model=minimind_moe model.num_hidden_layers=2 train.batch_size=2",
}


SMOLLM = (
    "model=minimind_64m model.hidden_size=576 model.num_hidden_layers=30 model.num_attention_heads=9 model.num_key_value_heads=3 model.head_dim=64 "
    "model.intermediate_size=1536 model.vocab_size=49152"
)
LONG_CASES = {
    "26m, packed, bf16, long": "model=minimind_26m data.max_length=512 train.batch_size=8 optimizer=adamw precision=bf16",
    "26m, packed, long": "model=minimind_26m data.max_length=512 train.batch_size=4 optimizer=adamw",
    "26m, LoRA, bf16, long": "model=minimind_26m stage=lora data.max_length=512 train.batch_size=8 precision=bf16",
    "26m, full checkpointing, long": "model=minimind_26m data.max_length=512 train.batch_size=8 optimizer=adamw train.activation_checkpointing=full",
    "SmolLM2-135M, packed, bf16, long": f"{SMOLLM} data.max_length=512 train.batch_size=4 optimizer=adamw precision=bf16",
    "MoE of 4 experts, 2 layers, long": "model=minimind_moe model.num_hidden_layers=2 data.max_length=512 train.batch_size=8",
}


def measure(overrides: list[str], stop_after: int = 0) -> tuple[float, float]:
    """Return (peak memory in MiB, seconds from the first step to the last one) of train.py.

    `stop_after`: steps; 0: it ends by itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "runner" / "train.py"),
            *overrides,
            "train.log_every=1",
            f"hydra.run.dir={folder}/run",
        ]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        metrics = Path(folder) / "run" / "metrics.jsonl"
        if stop_after:
            while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if metrics.exists() and metrics.read_text().count('"loss"') >= stop_after:
                    child.send_signal(signal.SIGTERM)
                    break
                time.sleep(0.2)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != (INTERRUPTED if stop_after else 0):
            raise SystemExit(f"train.py {' '.join(overrides)} ended with {child.returncode}")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return usage.ru_maxrss / 1024, lines[-1]["time"]


def estimate(overrides: list[str]) -> dict:
    """Return the plan of the run, as JSON values."""
    command = [sys.executable, str(ROOT / "runner" / "plan.py"), *overrides, "json=true"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output)["runs"][0]


def row(name: str) -> str:
    if name in LONG_CASES:
        overrides = [*LONG_CASES[name].split(), *SHARED, *LONG]
        peak, seconds = measure(overrides, LONG_STEPS)
        plan = estimate([*overrides, "timing=false"])
    else:
        overrides = [*CASES[name].split(), *SHARED, *SHORT]
        plan, (peak, seconds) = estimate(overrides), measure(overrides)
    planned = plan["memory"]["total"] / 2**20
    shape, trial = plan["data"]["shape"], plan["time"]
    sizes = [f"{planned:,.0f} MiB", f"{trial['peak_bytes'] / 2**20:,.0f} MiB" if trial else "-", f"{peak:,.0f} MiB"]
    times = [f"{trial['total_seconds']:.1f} s", f"{seconds:.1f} s"] if trial else ["-", "-"]
    largest = f"{shape['rows']} x {shape['tokens']}"
    error = f"{planned / peak - 1:+.1%}"
    return f"| {' | '.join([name, largest, *sizes, error, *times])} |"


def table(names: list[str]) -> str:
    lines = [
        "Memory of the training process: estimate (`timing=false`), peak of the trial, peak of the run, error of the estimate. Time of 3 steps of short runs.",
        "",
        "| configuration | largest micro-batch | estimate | trial | run | error | planned time | time of the run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        lines.append(row(name))
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--only", choices=CASES | LONG_CASES, help="measure this configuration only")
    args = parser.parse_args()
    names = [args.only] if args.only else [*CASES, *LONG_CASES]
    report_result(
        "plan",
        "Estimates of plan.py against measured runs",
        "python benchmarks/plan.py --write",
        table(names),
        args.write,
    )
