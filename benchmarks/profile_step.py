"""Shares of a training step by kind of work, on the CPU: python benchmarks/profile_step.py [--path FILE] [--precision
bf16+fp32] [--compile default+off] [--write] [OVERRIDE ...].

torch.profiler watches the engine's step, each precision and compile mode in a process of its own. Times are those of
the thread that calls the operators; each is counted once, without the operators that it calls. A kernel of this project
is an operator, and so is each loop of the compiler: programs are compiled with `cpp.enable_kernel_profile`, apart from
those of runs. What is of no kind is "other", whose largest operators are listed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lib.interleave import case_spec
from lib.results import file_part, machine_facts, machine_name, report_result, result_parser
from lib.runs import SAMPLES, build_state

ROWS, LENGTH = 4, 512  # rows per step, tokens per row
WARMUP_STEPS = 3
LARGEST = 6  # operators of "other" that are listed
FACTS = machine_facts()  # before modules are imported that add variables
UPDATE = "update of the weights"  # event around the gradient norm, clipping and the optimizer
LAYERS = {"off": "uncompiled", "default": "compiled", "auto": "auto"}  # value of train.compile -> its name in the table

PRODUCTS, ATTENTION, LOSS_PRODUCTS, LOSS = (
    "matrix products outside of attention and loss",
    "attention",
    "matrix products of the loss",
    "the rest of the loss",
)
LOOPS, COPIES, OPTIMIZER, SWIGLU, OTHER = (
    "fused loops of the compiler",
    "casts and copies",
    "optimizer and gradient norm",
    "SwiGLU",
    "other",
)
KINDS = (PRODUCTS, LOSS_PRODUCTS, LOSS, ATTENTION, LOOPS, COPIES, OPTIMIZER, SWIGLU, OTHER)
PYTHON = "outside of operators (Python)"

# Parts of the name of an event; all that happens inside of one has its kind, whatever the operator
ENCLOSING = {
    OPTIMIZER: (UPDATE, "Optimizer.step#", "Optimizer.zero_grad#"),
    ATTENTION: (
        "lm_runner::attention",
        "lm_runner::fused_attention",
        "lm_runner_attention",
        "lm_runner_fused_attention",
        "scaled_dot_product",
    ),
    LOSS: ("lm_runner::nll", "lm_runner_nll", "cross_entropy", "nll_loss"),
}
# Names of operators; a trailing * stands for any end
OPERATORS = {
    PRODUCTS: (
        "aten::mm",
        "aten::addmm",
        "aten::addmm_",
        "aten::bmm",
        "aten::baddbmm",
        "mkldnn::_linear_pointwise",
        "mkl::_mkl_linear",
        "lm_runner_weight_gradients",
        "lm_runner_multiply",
    ),
    COPIES: ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::clone", "aten::contiguous", "aten::_foreach_copy_"),
    SWIGLU: ("lm_runner_swiglu_*", "lm_runner::swiglu_output*", "aten::silu", "aten::silu_backward"),
}
SWIGLU_EVENTS = ("SwiGLU", "SwiGLUBackward")  # autograd function of uncompiled layers
LOOP_PART = "cpp_fused_"  # of the name that the compiler gives to a loop


class Profile(NamedTuple):
    seconds: dict[str, float]  # kind -> per step
    other: list[tuple[str, float]]  # largest operators of OTHER, per step
    step_seconds: float  # median, with the profiler
    plain_seconds: float  # median, without it
    # the kernel of attention and its reason, where one was chosen; with the fused one, SwiGLU is a kernel, too
    attention: str = ""


def kind_of(names: Sequence[str]) -> str:
    """Return the kind of work of an operator.

    `names`: its own and those of the events around it, from the inside to the outside.
    """
    own = names[0]
    for kind, parts in ENCLOSING.items():
        if any(part in name for name in names for part in parts):
            return LOSS_PRODUCTS if kind == LOSS and is_one_of(own, OPERATORS[PRODUCTS]) else kind
    if LOOP_PART in own:
        return LOOPS
    for kind, patterns in OPERATORS.items():
        if is_one_of(own, patterns):
            return kind
    return SWIGLU if any(name in SWIGLU_EVENTS for name in names) else OTHER


def is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in patterns)


def names_of(event: Any) -> Iterator[str]:
    while event is not None:
        yield event.name
        event = event.cpu_parent


def sum_by_kind(events: Sequence[Any]) -> tuple[Counter[str], Counter[str]]:
    """Return kind -> seconds, and operator -> seconds of OTHER, of the events of torch.profiler."""
    kinds, other = Counter[str](), Counter[str]()
    for event in events:
        kind, seconds = kind_of(list(names_of(event))), event.self_cpu_time_total / 1e6
        kinds[kind] += seconds
        if kind == OTHER:
            other[event.name] += seconds
    return kinds, other


def record_calls(state: Any) -> None:
    """Make events of the kernels in C++, which are called without an operator of their own, and of the update of the
    weights.
    """
    from torch.profiler import record_function

    from models.layers.cpu_kernels.library import call_kernel

    def recorded_kernel(name: str, *arguments: Any) -> None:
        with record_function(name):
            call_kernel(name, *arguments)

    for module in list(sys.modules.values()):
        if module.__name__.startswith("models.") and getattr(module, "call_kernel", None) is call_kernel:
            module.__dict__["call_kernel"] = recorded_kernel
    update = state.precision.clip_and_update

    def recorded_update(*arguments: Any) -> Any:
        with record_function(UPDATE):
            return update(*arguments)

    state.precision.clip_and_update = recorded_update


def profile_steps(overrides: list[str], steps: int) -> Profile:
    """Profile the engine in this process."""
    from runner.engine.device.spinning import adapt_spinning, set_wait_policy

    set_wait_policy()  # as the command does, before torch is imported
    import torch
    import torch._inductor.config as inductor

    from runner.engine.loop import train_step

    inductor.cpp.enable_kernel_profile = True  # names the loops
    with adapt_spinning():
        state = build_state(overrides)
        batches = list(
            islice((step for epoch in range(100) for step in state.loader.iter_epoch(epoch)), WARMUP_STEPS + 2 * steps)
        )

        def timed_steps(chosen: list[Any]) -> list[float]:
            seconds = []
            for step in chosen:
                started = time.perf_counter()
                train_step(state, step, lr=1e-4)
                seconds.append(time.perf_counter() - started)
            return seconds

        timed_steps(batches[:WARMUP_STEPS])
        plain = timed_steps(batches[WARMUP_STEPS::2])
        record_calls(state)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            profiled = timed_steps(batches[WARMUP_STEPS + 1 :: 2])
    kinds, other = sum_by_kind(profiler.events())
    seconds = {kind: kinds[kind] / len(profiled) for kind in KINDS} | {
        PYTHON: max(0.0, sum(profiled) - kinds.total()) / len(profiled)
    }
    largest = [(name, total / len(profiled)) for name, total in other.most_common(LARGEST)]
    return Profile(
        seconds,
        largest,
        statistics.median(profiled),
        statistics.median(plain),
        state.kernel_reasons.get("attention", ""),
    )


def table(profiles: dict[str, Profile]) -> str:
    """Return the table of the kinds, and the largest operators of OTHER. The shares of a column sum to 1."""
    totals = {name: sum(profile.seconds.values()) for name, profile in profiles.items()}
    lines = [f"| kind of work | {' | '.join(profiles)} |", "|---" * (1 + len(profiles)) + "|"]
    for kind in (*KINDS, PYTHON):
        cells = (
            f"{profile.seconds[kind] / totals[name]:.1%} ({profile.seconds[kind] * 1e3:.0f} ms)"
            for name, profile in profiles.items()
        )
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    steps = (
        f"{profile.step_seconds * 1e3:.0f} ms ({profile.plain_seconds * 1e3:.0f} ms)" for profile in profiles.values()
    )
    lines.append(f"| median step (without the profiler) | {' | '.join(steps)} |")
    lines += ["", f'Largest operators of "{OTHER}":', ""]
    for name, profile in profiles.items():
        lines.append(
            f"- {name}: "
            + ", ".join(f"`{operator}` {seconds / totals[name]:.1%}" for operator, seconds in profile.other)
        )
    lines += [
        "",
        *(f"Attention, {name}: {profile.attention}." for name, profile in profiles.items() if profile.attention),
    ]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, Profile]:
    """Return name -> profile of each precision and compile mode."""
    overrides, profiles = [f"model={args.model}", *args.overrides], dict[str, Profile]()
    with tempfile.TemporaryDirectory() as folder:
        spec = case_spec(
            overrides,
            stage=args.stage,
            path=args.path,
            tokenizer=str(SAMPLES / "tokenizer"),
            rows=ROWS,
            length=LENGTH,
            folder=folder,
        )
        for precision in args.precision.split("+"):
            for mode in args.compile.split("+"):
                case = [
                    *spec["overrides"],
                    f"precision={precision}",
                    "data.packing=best_fit",
                    f"train.compile={mode}",
                    "train.epochs=100",
                ]
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    profiles[f"{precision}, {LAYERS[mode]}"] = pool.submit(profile_steps, case, args.steps).result()
    return profiles


def main(args: argparse.Namespace) -> None:
    if unknown := set(args.compile.split("+")) - set(LAYERS):
        raise SystemExit(f"--compile must be of {', '.join(LAYERS)}, joined by +; got {', '.join(sorted(unknown))}")
    flags = {
        "path": Path(args.path).name,
        "stage": args.stage,
        "model": args.model,
        "precision": args.precision,
        "compile": args.compile,
        "steps": args.steps,
    }
    command = " ".join(
        [
            "python benchmarks/profile_step.py",
            *(f"--{name} {value}" for name, value in flags.items()),
            *args.overrides,
            "--write",
        ]
    )
    text = f"{args.model}, {args.stage}, {ROWS} x {LENGTH} tokens, {args.steps} steps.\n\n{table(measure(args))}"
    report_result(f"profile-{file_part(machine_name(FACTS))}", "Shares of a training step", command, text, args.write)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument("--path", default=str(SAMPLES / "pretrain.jsonl"))
    parser.add_argument("--stage", default="pretrain", choices=["pretrain", "sft"])
    parser.add_argument("--model", default="minimind_26m")
    parser.add_argument("--precision", default="bf16", help="one or more of bf16, fp32, joined by + (default: bf16)")
    parser.add_argument("--compile", default="default", help="values of train.compile, joined by + (default: default)")
    parser.add_argument("--steps", type=int, default=6, help="profiled steps (default: 6)")
    parser.add_argument("overrides", nargs="*", help="overrides of train.py")
    main(parser.parse_args())
