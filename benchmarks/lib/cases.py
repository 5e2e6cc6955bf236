"""What a measured process does: the engine's step, the peak of the machine, and the gate through which a trainer gets
its batches.

A trainer is measured by the batches it takes: one turn lasts from taking a batch to asking for the next, or for the one
`steps_per_turn` later.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from lib.environment import imported_code, process_facts
from lib.runs import build_state

PADDING_BATCHES = 150  # from which the share of padding is counted: more than are timed
LONGEST_KERNELS = 8  # that a profile names
PEAK_SECONDS = 0.5  # per round, for the peak of the machine


class BatchCount(NamedTuple):
    useful: int  # tokens without padding
    computed: int  # tokens with padding
    lengths: list[int]  # of the sequences that attention computes


CountFunction = Callable[[Any], BatchCount]


class Gate:
    """Passes batches on when stdin asks for a turn; prints the time of each turn as a line of JSON."""

    def __init__(self, spec: dict) -> None:
        self.spec, self.output = spec, os.fdopen(os.dup(1), "w")
        self.during_turn: Callable[[], AbstractContextManager[None]] = nullcontext
        self.recorded: dict[str, Any] = {}  # values that are sent with the turn, beside its times
        os.dup2(2, 1)  # what a trainer prints must not mix with the measurements

    def send(self, **values: Any) -> None:
        print(json.dumps(values), file=self.output, flush=True)

    def wait(self) -> str:
        """Return the next request: step, profile or padding. Ends the process when stdin is closed."""
        while (request := sys.stdin.readline().strip()) in ("environment", "code"):
            self.send(
                **(
                    imported_code()
                    if request == "code"
                    else process_facts(adapts_spinning=self.during_turn is not nullcontext)
                )
            )
        if not request:
            os._exit(0)  # without the shutdown of the trainer
        return request

    def through(self, batches: Iterable, count: CountFunction) -> Iterator:
        batches = iter(batches)
        while True:
            if (request := self.wait()) == "padding":
                counts = [count(batch) for batch in itertools.islice(batches, PADDING_BATCHES)]
                self.send(useful=sum(each.useful for each in counts), computed=sum(each.computed for each in counts))
                continue
            started, processor, useful, computed, flops = time.perf_counter(), time.process_time(), 0, 0, 0.0
            with self.profiled() if request == "profile" else self.during_turn():
                for _ in range(self.spec.get("steps_per_turn", 1)):
                    batch = next(batches, None)
                    if batch is None:
                        self.send(error="no data is left: give a larger file")
                        os._exit(1)
                    counted = count(batch)
                    useful, computed, flops = (
                        useful + counted.useful,
                        computed + counted.computed,
                        flops + self.flops(counted),
                    )
                    yield batch
                synchronize()
                seconds, cpu = time.perf_counter() - started, time.process_time() - processor
            self.send(
                seconds=seconds,
                cpu=cpu,
                useful=useful,
                computed=computed,
                flops=flops,
                memory=peak_memory_mb(),
                **self.recorded,
            )

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Send with the turn what its kernels took: launches and seconds of each step, and the shares of the longest.

        On a CPU kernels are operators.
        """
        import torch
        from torch.profiler import ProfilerActivity, profile

        kind, steps = "device" if uses_gpu() else "cpu", self.spec.get("steps_per_turn", 1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if uses_gpu() else [])]
        with profile(activities=activities) as profiler, self.during_turn():
            yield
        kernels = [
            (getattr(event, f"self_{kind}_time_total") / 1e6, event.count, event.key)
            for event in profiler.key_averages()
            if event.device_type == (torch.autograd.DeviceType.CUDA if uses_gpu() else torch.autograd.DeviceType.CPU)
            and not event.is_user_annotation  # the span of an optimizer's step on the GPU
        ]
        total = sum(seconds for seconds, *_ in kernels)
        longest = [[name[:80], seconds / total] for seconds, _, name in sorted(kernels, reverse=True)[:LONGEST_KERNELS]]
        self.recorded |= {
            "launches": sum(count for _, count, _ in kernels) / steps,
            "busy": total / steps,
            "longest": longest,
        }

    def flops(self, count: BatchCount) -> float:
        """Return the operations of forward and backward pass; attention is causal and limited to its sequence."""
        model = self.spec["model"]
        attention = (
            6
            * model["num_hidden_layers"]
            * model["num_attention_heads"]
            * model["head_dim"]
            * sum(length**2 for length in count.lengths)
        )
        return 6.0 * self.spec["parameters"] * count.computed + attention


def uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def synchronize() -> None:
    """Wait for the kernels of a GPU."""
    if uses_gpu():
        sys.modules["torch"].cuda.synchronize()


def peak_memory_mb() -> float:
    """Return the peak memory of this process, on the GPU if it uses one."""
    if uses_gpu():
        return sys.modules["torch"].cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def forever(batches: Iterable) -> Iterator:
    while True:
        yield from batches


def state_of(spec: dict, *overrides: str) -> Any:
    """Return the state of our run before its first step. Its rows are those that every other trainer gets."""
    return build_state([*spec["overrides"], *overrides])


def ours(
    spec: dict, gate: Gate, packing: str = "best_fit", compile: str = "off", too_long: str = "", recompute: str = "none"
) -> None:
    """The engine's training step.

    `reused_batches` of the spec: make this number before and reuse them, where the data is not measured.

    `record_loss` of the spec: send the loss of each step, too.
    """
    # of another checkout the module may have its earlier name; an older one has none, and its command does not adapt
    for module in ("runner.engine.device.spinning", "runner.engine.device.cpu.spinning"):
        with suppress(ModuleNotFoundError):
            spinning = importlib.import_module(module)
            # as the command does, before torch is imported; building the state does what else the command decides
            spinning.set_wait_policy()
            # per turn: while this process is stopped, the load of the other cases is none that it meets
            gate.during_turn = spinning.adapt_spinning
            break
    from runner.engine.loop import train_step

    overrides = [
        f"precision={spec['precision']}",
        f"data.packing={packing}",
        f"train.compile={compile}",
        "train.epochs=100",
    ]
    overrides += [f"train.activation_checkpointing={recompute}"] * (recompute != "none") + [
        f"data.too_long={too_long}"
    ] * bool(too_long)
    state, rows = state_of(spec, *overrides), spec["rows"]
    if len(state.pipeline.train) < rows:
        raise SystemExit(
            f"{len(state.pipeline.train)} packed sequences for steps of {rows} rows: give a larger file, or fewer --rows"
        )
    steps = (
        batches
        for epoch in range(100)
        for batches in state.loader.iter_epoch(epoch)
        if len(batches[0].input_ids) == rows
    )
    if "reused_batches" in spec:
        steps = forever(list(itertools.islice(steps, spec["reused_batches"])))

    def count(batches: list) -> BatchCount:
        lengths = [int(length) for batch in batches for length in batch.lengths]
        padded = [batch.input_ids.shape[1] for batch in batches for _ in batch.input_ids]
        return BatchCount(
            sum(lengths),
            sum(batch.input_ids.numel() for batch in batches),
            lengths if packing == "best_fit" else padded,
        )

    for batches in gate.through(steps, count):
        output = train_step(state, batches, lr=1e-4)
        gate.recorded["kernels"] = chosen_kernels(state)
        if spec.get("record_loss"):
            gate.recorded["loss"] = float(output.sums["loss"])


def chosen_kernels(state: Any) -> str:
    """Return what the run has chosen by measuring; earlier checkouts have chosen only attention."""
    reasons = getattr(state, "kernel_reasons", None)
    return (
        getattr(state, "attention_reason", "")
        if reasons is None
        else "; ".join(f"{title}: {reason}" for title, reason in reasons.items())
    )


def machine(spec: dict, gate: Gate) -> None:
    """The peak of the machine: a large matrix product in this precision, or on a CPU in fp32 if that is faster, and a
    copy in memory.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() and spec.get("device") != "cpu" else "cpu"
    size, repeats = (8192, 10) if device == "cuda" else (2048, 1)
    torch.set_float32_matmul_precision("high" if spec["precision"] == "tf32" else "highest")
    dtype = torch.float32 if spec["precision"] in ("fp32", "tf32") else torch.bfloat16
    dtypes = {dtype} if device == "cuda" else {dtype, torch.float32}
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and device == "cpu":
        dtypes = {torch.float32}  # a product in bf16 takes a minute
    products = [torch.randn(2, size, size, device=device, dtype=each) for each in dtypes]
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)

    def seconds_per_call(work: Callable[[], object]) -> tuple[float, float]:
        """Return wall-clock and processor time per call, measured for as long as a step: other load affects both alike."""
        started, processor, calls = time.perf_counter(), time.process_time(), 0
        while (seconds := time.perf_counter() - started) < PEAK_SECONDS:
            for _ in range(repeats):
                work()
            synchronize()
            calls += repeats
        return seconds / calls, (time.process_time() - processor) / calls

    while gate.wait():
        (product, cpu), (copy, _) = (
            min(seconds_per_call(partial(torch.mm, *pair)) for pair in products),
            seconds_per_call(lambda: target.copy_(source)),
        )
        copied = 2 * source.nbytes / copy
        gate.send(
            seconds=product, cpu=cpu, useful=0, computed=0, flops=2.0 * size**3, copied=copied, memory=peak_memory_mb()
        )
