"""Whether the OpenMP threads of this process spin while they wait for each other.

A step has thousands of short parallel regions. Threads that sleep between them are woken by the kernel each time: 0.55
times the tokens per second on two quiet cores. Threads that spin on a core that another process wants hold that process
up and are held up by it: up to 8 times slower. So they spin while no other process wants their cores, and sleep
otherwise.

libgomp reads its settings only once, but it looks at one thing at each wait: a process with more OpenMP threads than
cores does not spin ("throttled", libgomp/env.c and config/linux/wait.h of GCC). `SleepingThreads` makes and ends the
idle threads that switch this.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC_STAT, PROC_MAPS = Path("/proc/stat"), Path("/proc/self/maps")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SAMPLE_SECONDS = 0.25
BUSY_CORES = 0.25  # use of the cores by other processes, beyond those that this process leaves free
QUIET_SAMPLES, MAX_QUIET_SAMPLES = 4, 128  # readings without other load after which the threads spin again
FIELDS = (1, 2, 3, 6, 7)  # user, nice, system, irq and softirq of a line of /proc/stat


def _is_fixed() -> bool:
    """Return whether nothing is changed: the user has set it, or the one thread of this process waits for no other."""
    return any(name in os.environ for name in WAIT_VARIABLES) or os.environ.get("OMP_NUM_THREADS") == "1"


def set_wait_policy() -> None:
    """Let torch's threads sleep while they wait for each other where `adapt_spinning` cannot watch the machine; call
    before torch is imported.
    """
    if not _is_fixed() and read_busy_seconds() is None:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def read_busy_seconds() -> float | None:
    """Return the processor time (s) that all processes have used on the cores of this process since the machine
    started; None if it is not known.
    """
    if not sys.platform.startswith("linux"):
        return None
    cores, ticks = os.sched_getaffinity(0), 0
    try:
        lines = PROC_STAT.read_text(encoding="ascii").splitlines()
        for line in lines:
            fields = line.split()
            if fields and fields[0].startswith("cpu") and fields[0][3:].isdigit() and int(fields[0][3:]) in cores:
                ticks += sum(int(fields[number]) for number in FIELDS)
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


@dataclass(eq=False)
class SleepingThreads:
    """While `start()`ed, this process has more OpenMP threads than cores, all of them idle, and no thread of it spins."""

    libraries: Sequence[ctypes.CDLL]
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        if self._thread is None:
            self._is_over = threading.Event()
            self._thread = threading.Thread(
                target=self._hold_team, args=(self._is_over,), name="sleeping-threads", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._is_over.set()
            self._thread.join()
            self._thread = None

    def _hold_team(self, is_over: threading.Event) -> None:
        """Run an empty parallel region: its threads belong to this one, wait for its next region, and end with it."""
        for library in self.libraries:
            library.GOMP_parallel(
                ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p), None, library.omp_get_num_procs() + 1, 0
            )
        is_over.wait()


def find_libgomp() -> list[ctypes.CDLL]:
    """Return the OpenMP libraries of GCC that this process has loaded: torch brings its own, and so do other packages."""
    libraries = []
    with suppress(OSError):
        mapped = {
            f"/{line.partition('/')[2]}"
            for line in PROC_MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
        }
        for path in sorted(path for path in mapped if Path(path).name.startswith("libgomp")):
            with suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                library.GOMP_parallel.restype = None
                libraries += [library] if library.omp_get_num_procs and library.omp_get_thread_num else []
    return libraries


@dataclass(eq=False)
class ForeignLoad:
    """Cores that other processes have used since the last reading."""

    busy: Callable[[], float | None] = read_busy_seconds
    own: Callable[[], float] = time.process_time
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._last = self._read()

    def _read(self) -> tuple[float, float, float]:
        return self.busy() or 0.0, self.own(), self.clock()

    def read(self) -> float:
        previous, self._last = self._last, self._read()
        busy, own, seconds = (now - before for now, before in zip(self._last, previous, strict=True))
        return max(0.0, busy - own) / seconds if seconds > 0 else 0.0


@dataclass(eq=False)
class SpinControl:
    """Decides after each reading whether the threads sleep.

    `free_cores` returns how many cores this process does not use.

    They sleep at the first reading of other load. They spin again after a quiet second, after two if that load came
    back, and so on up to MAX_QUIET_SAMPLES: load that comes and goes would otherwise meet spinning threads each time.
    """

    sleeping: SleepingThreads
    free_cores: Callable[[], int]
    # readings without other load: in a row, and before the threads spin again
    _quiet: int = 0
    _needed: int = QUIET_SAMPLES

    def update(self, foreign_cores: float) -> None:
        if foreign_cores > self.free_cores() + BUSY_CORES:
            if not self.sleeping.is_started:
                self._needed = (
                    QUIET_SAMPLES if self._quiet >= MAX_QUIET_SAMPLES else min(2 * self._needed, MAX_QUIET_SAMPLES)
                )
            self._quiet = 0
            self.sleeping.start()
            return
        self._quiet += 1
        if self._quiet >= self._needed:
            self.sleeping.stop()


@contextmanager
def adapt_spinning() -> Iterator[None]:
    """Let the OpenMP threads of this process sleep while other processes want its cores.

    The block imports torch, or has done so.
    """
    if _is_fixed() or read_busy_seconds() is None:
        yield
        return
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch_load, args=(is_over,), name="spin-control", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def _watch_load(is_over: threading.Event) -> None:
    load, cores = ForeignLoad(), len(os.sched_getaffinity(0))
    control: SpinControl | None = None
    while not is_over.wait(SAMPLE_SECONDS):
        foreign = load.read()
        # False while torch is being imported
        if control is None and hasattr(sys.modules.get("torch"), "get_num_threads"):
            if not (libraries := find_libgomp()):
                return
            from runner.engine.device.cpu import current_threads

            control = SpinControl(SleepingThreads(libraries), lambda: cores - current_threads())
        if control is not None:
            control.update(foreign)
    if control is not None:
        control.sleeping.stop()
