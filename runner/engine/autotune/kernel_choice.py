"""A choice between kernels, by their times or by what this machine can compute: recorded, and repeated on resume."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runner.engine.device.compile import is_out_of_memory, set_inductor_cache
from runner.engine.device.cpu import freed_memory_kept

# another kernel than the default takes at most this share of its time: a choice by chance would change the bits of a
# run for nothing
WORTHWHILE = 0.9
MAX_MEASURING_SECONDS, MIN_TURNS = 10.0, 2  # of measuring one choice once, and what is worth measuring at all
MAX_CHOICE_BYTES = 10_000
MAX_KERNEL_NAME = 40  # characters of a name from a checkpoint in a message


@dataclass(frozen=True)
class KernelChoice:
    """One choice between kernels that compute the same, each exact to its documented rounding."""

    fact: str  # its name among the facts of a run's environment, and in the log
    default: str
    others: tuple[str, ...]
    apply: Callable[[str], None]
    workload: Mapping[str, Any] = field(default_factory=dict)  # JSON values: what the times depend on in this run
    # kernel -> seconds of a layer; None: the last of `others` that this machine can compute is taken
    measure: Callable[[Sequence[str]], dict[str, float]] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)  # kernel -> name in the log, where it has another
    # raises KernelsUnavailableError where this machine cannot compute the kernel
    load: Callable[[str], None] = lambda kernel: None

    def label(self, kernel: str) -> str:
        return self.labels.get(kernel, kernel)


class ChosenKernel(NamedTuple):
    """A kernel of a `KernelChoice`."""

    kernel: str
    reason: str  # for the header of the log; "": nothing was chosen
    available: tuple[str, ...]  # kernels that this process can compute


def measured_kernel(
    choice: KernelChoice,
    facts: Callable[[], Mapping[str, Any]],
    before_measuring: Callable[[], object] = lambda: None,
) -> ChosenKernel:
    """Return the fastest kernel.

    `facts()` (JSON values): the processor, the libraries and all else that the times depend on; times measured before
    are kept with the compiled programs. `before_measuring` is called unless all times are known.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    missing = dict[str, str]()
    for name in choice.others:
        try:
            choice.load(name)
        except KernelsUnavailableError as error:
            missing[name] = str(error)
    names = [name for name in (choice.default, *choice.others) if name not in missing]
    absent = "".join(f"; no {name} kernel: {error}" for name, error in missing.items())
    if choice.measure is None:
        kernel = names[-1]
        return ChosenKernel(kernel, choice.label(kernel) + absent, tuple(names))
    file = _times_file(choice, facts(), names)
    times = _read_times(file, choice)
    if times is None:
        before_measuring()
        try:
            with freed_memory_kept():
                measured = dict(choice.measure(names))
                if _fastest(choice, measured) != choice.default:  # other load may have disturbed the first time
                    measured |= choice.measure(names)
        except (KernelsUnavailableError, MemoryError, RuntimeError) as error:
            is_unavailable = isinstance(error, KernelsUnavailableError)
            if not is_unavailable and not is_out_of_memory(error):
                raise
            reason = error if is_unavailable else "out of memory"  # which the first step reports
            return ChosenKernel(
                choice.default, f"{choice.label(choice.default)} (not measured: {reason})", tuple(names)
            )
        _write_times(file, choice, measured)
        times = _read_times(file, choice) or measured  # those of another run that has measured at the same time
    kernel = _fastest(choice, times)
    listed = ", ".join(f"{choice.label(name)} {seconds * 1000:.1f}" for name, seconds in times.items())
    listed += "; too slow to measure the others" * (len(times) == 1 < len(names))
    return ChosenKernel(kernel, f"{choice.label(kernel)} (measured, ms a layer: {listed}){absent}", tuple(names))


def _times_file(choice: KernelChoice, facts: Mapping[str, Any], names: Sequence[str]) -> Path:
    """`names`: kernels that this machine can compute."""
    key = json.dumps([choice.fact, dict(choice.workload), dict(facts), choice.others, list(names)], sort_keys=True)
    return (
        set_inductor_cache()
        / "cpu_kernels"
        / f"choice-{choice.fact}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    )


def _fastest(choice: KernelChoice, times: Mapping[str, float]) -> str:
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] < WORTHWHILE * times[choice.default] else choice.default


def kernel_of_checkpoint(choice: KernelChoice, saved: object) -> ChosenKernel:
    """Return the kernel of a checkpoint, `saved` in its environment; the default where this machine cannot compute it,
    which the resume reports.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    if saved in (None, choice.default):
        return ChosenKernel(choice.default, "", (choice.default,))
    if saved not in choice.others:
        reason = f"{choice.label(choice.default)}: that of the checkpoint, {str(saved)[:MAX_KERNEL_NAME]}, is none of this program and these settings"
        return ChosenKernel(choice.default, reason, (choice.default,))
    kernel = str(saved)
    try:
        choice.load(kernel)
    except KernelsUnavailableError as error:
        reason = f"{choice.label(choice.default)}: the {kernel} kernel of the checkpoint is not available, {error}"
        return ChosenKernel(choice.default, reason, (choice.default,))
    return ChosenKernel(kernel, f"{choice.label(kernel)}, as its checkpoint", (choice.default, kernel))


def agree_on_kernel(choice: KernelChoice, ranks: Sequence[Sequence[Any]]) -> ChosenKernel:
    """Return the kernel of all ranks from the `ChosenKernel` of each, as JSON: that of the first, unless some rank
    cannot compute it.
    """
    kernel, reason, available = ranks[0]
    if all(kernel in rank_available for _, _, rank_available in ranks):
        return ChosenKernel(kernel, reason, tuple(available))
    return ChosenKernel(
        choice.default, f"{choice.label(choice.default)}: a rank has no {kernel} kernel", tuple(available)
    )


def shortest_times(runs: Mapping[str, Callable[[], object]], turns: int, passes: int) -> dict[str, float]:
    """Return name -> the shortest time of a call, seconds; those that raise KernelsUnavailableError are left out.

    They take turns of several calls, because a training that starts beside this one disturbs some of them. The first
    call of a turn is not counted: oneDNN keeps the programs of the last few products only. Fewer turns where all would
    take longer than MAX_MEASURING_SECONDS; the first name alone where two would.
    """
    first = next(iter(runs))
    times: dict[str, list[float]] = {first: _time_turn(runs[first], passes)}
    fitting = int(MAX_MEASURING_SECONDS / ((passes + 1) * len(runs) * min(times[first])))
    if fitting < MIN_TURNS:
        return {first: min(times[first])}
    for name in [*runs] * min(turns, fitting):
        times.setdefault(name, []).extend(_time_turn(runs[name], passes))
    return {name: min(each) for name, each in times.items() if each}


def _time_turn(run: Callable[[], object], passes: int) -> list[float]:
    """Return the seconds of `passes` calls after one that is not counted; that of the latter if it alone takes too
    long. [] for an unavailable kernel.
    """
    from models.layers.cpu_kernels.library import KernelsUnavailableError

    seconds: list[float] = []
    with suppress(KernelsUnavailableError):
        for _ in range(passes + 1):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
            if seconds[0] > MAX_MEASURING_SECONDS:
                return seconds
    return seconds[1:]


def _read_times(file: Path, choice: KernelChoice) -> dict[str, float] | None:
    """Return kernel -> seconds that `_write_times` has written; None for anything else."""
    names = (choice.default, *choice.others)
    with suppress(OSError, ValueError, RecursionError):
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            times = json.loads(opened.read(MAX_CHOICE_BYTES))
        if (
            isinstance(times, dict)
            and choice.default in times
            and all(name in names and _is_time(each) for name, each in times.items())
        ):
            return times
    return None


def _is_time(value: object) -> bool:
    return isinstance(value, float) and 0 < value < math.inf


def _write_times(file: Path, choice: KernelChoice, times: Mapping[str, float]) -> None:
    """Write the file unless there is one: runs that measure at the same time then take the same kernel.

    A folder that cannot be written to is no error.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            complete = Path(folder) / file.name
            complete.write_text(json.dumps(times), encoding="utf-8")
            try:
                _link(complete, file)
            except FileExistsError:
                if _read_times(file, choice) is None:  # damaged
                    os.replace(complete, file)


def _link(complete: Path, file: Path) -> None:
    """Let `file` be the new file `complete`, or on a file system without hard links a copy.

    Raises FileExistsError if there is one.
    """
    try:
        os.link(complete, file)
    except FileExistsError:
        raise
    except OSError:
        with file.open("x", encoding="utf-8") as copy:
            copy.write(complete.read_text(encoding="utf-8"))
