"""One case of benchmarks/speed.py or gpu.py in a process of its own: says a line of JSON for each turn it is asked for on stdin.

Every trainer is driven by the batches it is given: a turn is the time from asking for a batch to asking for the next one, or for the one
so many (`stretch`) after it. Other people's trainers are in trainers.py.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Case = Callable[[dict, "Gate"], None]
Count = Callable[[Any], tuple[int, int, list[int]]]  # batch -> positions that are no padding, positions computed, lengths attention sees
COUNTED = 150  # batches by which padding is told: those that are timed are too few
SECONDS = 0.5  # that a machine's peak is measured over, each round


class Gate:
    """Deals batches when told to, and tells how long each was worked on."""

    def __init__(self, spec: dict) -> None:
        self.spec, self.told = spec, os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a trainer prints is no measurement

    def tell(self, **facts: Any) -> None:
        print(json.dumps(facts), file=self.told, flush=True)

    def wait(self) -> str:
        word = sys.stdin.readline().strip()
        if not word:
            os._exit(0)  # nothing of a trainer's end is measured
        return word

    def through(self, batches: Iterable, count: Count) -> Iterator:
        batches = iter(batches)
        while True:
            if self.wait() == "fill":
                counts = [count(batch)[:2] for batch in itertools.islice(batches, COUNTED)]
                self.tell(useful=sum(useful for useful, _ in counts), computed=sum(computed for _, computed in counts))
                continue
            began, worked, useful, computed, flops = time.perf_counter(), time.process_time(), 0, 0, 0.0
            for _ in range(self.spec.get("stretch", 1)):
                batch = next(batches, None)
                if batch is None:
                    self.tell(error="the data is used up: give more of it")
                    os._exit(1)
                counted = count(batch)
                useful, computed, flops = useful + counted[0], computed + counted[1], flops + self.flops(*counted[1:])
                yield batch
            settle()
            spent, work = time.perf_counter() - began, time.process_time() - worked
            self.tell(seconds=spent, cpu=work, useful=useful, computed=computed, flops=flops, memory=memory())

    def flops(self, computed: int, lengths: list[int]) -> float:
        """Of forward and backward; attention looks back only, and only at what it has to."""
        model = self.spec["model"]
        attention = 6 * model["num_hidden_layers"] * model["num_attention_heads"] * model["head_dim"] * sum(length**2 for length in lengths)
        return 6.0 * self.spec["parameters"] * computed + attention


def on_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def settle() -> None:
    """Wait until a GPU has done what it was given."""
    if on_gpu():
        sys.modules["torch"].cuda.synchronize()


def memory() -> float:
    """Peak of this process in MB, on the GPU where it uses one."""
    if on_gpu():
        return sys.modules["torch"].cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forever(batches: Iterable) -> Iterator:
    while True:
        yield from batches


def run_of(spec: dict, *words: str) -> Any:
    """Our run, ready for its first step: its rows are what every other trainer gets too."""
    from runner.config.compose import compose_config
    from runner.engine.build import build_run

    return build_run(compose_config([*spec["words"], *words]), Path(tempfile.mkdtemp()), attempt=1, note=lambda **facts: None)


def ours(spec: dict, gate: Gate, packing: str = "pack", compile: str = "off", cut: bool = False, again: str = "none") -> None:
    """`made`: so many batches are made beforehand and used again and again, where feeding is not what is measured."""
    from runner.engine.loop import train_step

    words = [
        f"precision={spec['precision']}",
        f"data.packing={packing}",
        f"train.compile={compile}",
        "train.epochs=100",
        f"train.activation_checkpointing={again}",
    ]
    run = run_of(spec, *words, *(["data.too_long=truncate"] if cut else []))
    assert len(run.feed.train) >= spec["lines"], f"{len(run.feed.train)} windows of data for {spec['lines']} lines a step: give more data, or fewer --lines"
    steps = (batches for epoch in range(100) for batches in run.loader.steps(epoch) if len(batches[0].input_ids) == spec["lines"])
    if "made" in spec:
        steps = forever(list(itertools.islice(steps, spec["made"])))

    def count(batches: list) -> tuple[int, int, list[int]]:
        lengths = [int(length) for batch in batches for length in batch.lengths]
        computed = sum(batch.input_ids.numel() for batch in batches)
        return sum(lengths), computed, lengths if packing == "pack" else [batch.input_ids.shape[1] for batch in batches for _ in batch.input_ids]

    for batches in gate.through(steps, count):
        train_step(run, batches, lr=1e-4)


def product(precision: str, kind: str, size: int) -> Callable[[], object]:
    import torch

    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    a, b = (torch.randn(size, size, device=kind, dtype=torch.float32 if precision in ("fp32", "tf32") else torch.bfloat16) for _ in range(2))
    if precision != "fp8":
        return lambda: a @ b
    (left, right), one = (x.to(torch.float8_e4m3fn) for x in (a, b)), torch.ones((), device=kind)
    return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def machine(spec: dict, gate: Gate) -> None:
    """What the machine can do: a large matrix product in this precision, and copying."""
    import torch

    kind = "cuda" if torch.cuda.is_available() and spec.get("device") != "cpu" else "cpu"
    size, at_once = (8192, 10) if kind == "cuda" else (2048, 1)
    multiply = product(spec["precision"], kind, size)
    source = torch.ones(1 << 26, device=kind)
    target = torch.empty_like(source)

    def pace(work: Callable[[], object]) -> tuple[float, float]:
        """Seconds and processor seconds each time, over as long a stretch as a step: what disturbs the one disturbs the other."""
        began, worked, times = time.perf_counter(), time.process_time(), 0
        while (spent := time.perf_counter() - began) < SECONDS:
            for _ in range(at_once):
                work()
            settle()
            times += at_once
        return spent / times, (time.process_time() - worked) / times

    while gate.wait():
        (multiplied, cpu), (copy, _) = pace(multiply), pace(lambda: target.copy_(source))
        gate.tell(seconds=multiplied, cpu=cpu, useful=0, computed=0, flops=2.0 * size**3, copied=2 * source.nbytes / copy, memory=memory())


def of_others(name: str, *words: Any, **more: Any) -> Case:
    """Another trainer's case; what it needs is imported in its own process only."""

    def case(spec: dict, gate: Gate) -> None:
        from lib import trainers

        getattr(trainers, name)(spec, gate, *words, **more)

    return case


CASES: dict[str, Case] = {
    "machine": machine,
    "ours, packed": lambda spec, gate: ours(spec, gate),
    "ours, packed, compiled": lambda spec, gate: ours(spec, gate, compile="default"),
    "ours, padded": lambda spec, gate: ours(spec, gate, "none", cut=True),
    "MiniMind's script": of_others("minimind"),
    "HF Trainer, packed": of_others("hf", compiled=False),
    "HF Trainer, packed, compiled": of_others("hf", compiled=True),
    "TRL SFTTrainer, padded": of_others("trl", packing=False),
    "TRL SFTTrainer, packed": of_others("trl", packing=True),
    "litgpt, windows": of_others("litgpt", compiled=False),
    "litgpt, windows, compiled": of_others("litgpt", compiled=True),
    "nanochat, its own model, windows": of_others("nanochat", compiled=False),
    "nanochat, its own model, windows, compiled": of_others("nanochat", compiled=True),
}
# Run where --cases names them: what activation checkpointing costs and saves
MORE: dict[str, Case] = {
    f"recomputing {again}, packed{', compiled' * compiled}": partial(ours, compile="default" if compiled else "off", again=again)
    for compiled in (False, True)
    for again in ("selective", "whole")
}


if __name__ == "__main__" and sys.argv[1:]:  # `make bench` runs every file here, and this one has nothing to say by itself
    sys.modules["speed_cases"] = sys.modules["__main__"]  # as trainers.py knows us
    sys.path[:0] = [str(ROOT)]
    asked = json.loads(sys.argv[1])
    (CASES | MORE | {"ours": lambda spec, gate: ours(spec, gate, compile=spec["compile"])})[asked["case"]](asked, Gate(asked))
