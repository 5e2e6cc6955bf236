"""The kinds of faults: each disturbs the run of a Trial once.

Everything random comes from the trial's generator.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common.errors import OK, STOP_SIGNALS
from runner.fault_injection.probes import PHASES, DiskFault, DiskHook, WorkerProbe
from runner.fault_injection.rig import Trial, UninterruptedRun

FROM_TERMINAL = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to the whole process group
ANNOUNCEMENT = ": stopping"  # what a stop signal is acknowledged with
COLD_START_SECONDS = 3.0  # of imports, before a command that is not forked does what a fork does

Inject = Callable[[Trial, UninterruptedRun], None]


def kill(trial: Trial, reference: UninterruptedRun) -> None:
    """SIGKILL at a random moment; for every second fault in the next save after it."""
    cold, in_save, point = trial.is_cold, trial.result.number % 2 == 0, trial.rng.uniform(0, reference.seconds)
    start = reference.probe.read("start")[1]
    step = 0 if point < start else 1 + round((point - start) / (reference.seconds - start) * (reference.step - 1))
    if cold:
        seconds = point + trial.rng.uniform(0, COLD_START_SECONDS)
    else:
        seconds = point if step == 0 else trial.rng.uniform(0, 2 * reference.seconds_of("step"))
    launch = trial.launch(is_cold=cold)
    if not cold:  # by progress: on a machine with other load a time after the launch would mostly be in the start-up
        trial.wait(lambda: trial.probe.read("step")[0] >= step)
    trial.wait(_after(seconds))
    if in_save:
        trial.wait(lambda: is_saving(trial.run_dir))
    launch.send(signal.SIGKILL)
    trial.end(disturbed=True)
    phase = "between saves" if (trial.run_dir / "run.json").exists() else "before run.json"
    phase = "in a save" if is_saving(trial.run_dir) else phase
    when = "the launch" if cold or step == 0 else f"step {step} began"
    trial.result.fault = f"SIGKILL {seconds:.2f} s after {when}, {phase}{', real command' if cold else ''}"
    trial.result.injected = launch.code == -signal.SIGKILL


def is_saving(run_dir: Path) -> bool:
    return any(path.name.startswith((".tmp-step-", ".del-step-")) for path in (run_dir / "checkpoints").glob(".*"))


def disk(trial: Trial, reference: UninterruptedRun) -> None:
    """One, five or all file calls in the run directory fail from a random one on."""
    first = trial.rng.randint(1, max(1, reference.file_calls))
    fault = DiskFault(first, trial.rng.choice([1, 1, 5, 1 << 30]), trial.rng.choice([errno.ENOSPC, errno.EIO]))
    hook = DiskHook(trial.run_dir, fault)
    trial.launch(prepare=hook.install)
    trial.end()
    extent = {1: "once", 5: "five times"}.get(fault.times, "for ever")
    trial.result.fault = f"{errno.errorcode[fault.error]} at file call {first} of {reference.file_calls}, {extent}"
    trial.result.injected = hook.calls >= first


def flip(trial: Trial, reference: UninterruptedRun) -> None:
    """Damage one file of one checkpoint of a stopped run that has several."""
    launch = trial.launch()
    trial.wait(lambda: len(checkpoints(trial.run_dir)) >= 2)
    launch.send(signal.SIGKILL)
    trial.end(disturbed=True)
    files = [file for folder in checkpoints(trial.run_dir) for file in sorted(folder.iterdir())]
    if launch.code == OK or not files:
        return
    trial.result.fault, trial.result.injected = damage(trial.rng.choice(files), trial), True


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*"))


def damage(file: Path, trial: Trial) -> str:
    """Flip a bit of `file`, cut it short, or delete it; return what was done."""
    content, name = bytearray(file.read_bytes()), f"{file.parent.name}/{file.name}"
    how = trial.rng.choice(["flip", "flip", "cut", "delete"])
    if how == "delete" or not content:
        file.unlink()
        return f"{name} deleted"
    position = trial.rng.randrange(len(content))
    if how == "cut":
        file.write_bytes(content[:position])
        return f"{name} cut to {position} bytes"
    bit = trial.rng.randrange(8)
    content[position] ^= 1 << bit
    file.write_bytes(content)
    return f"{name}: bit {bit} of byte {position} flipped"


def stop(trial: Trial, reference: UninterruptedRun) -> None:
    """A stop signal in one of the phases that the undisturbed run went through."""
    phases = [phase for phase in PHASES if reference.probe.read(phase)[0]]
    phase, number = phases[trial.result.number % len(phases)], STOP_SIGNALS[trial.rng.randrange(len(STOP_SIGNALS))]
    if phase == "tokenizing":
        trial.rig.clear_cache()
    times = reference.probe.read(phase)[0]
    occurrence = trial.rng.randint(1, times) if phase != "start" else 0
    delay = trial.rng.uniform(0, reference.seconds_of(phase))
    launch = trial.launch()
    trial.wait(lambda: trial.probe.read(phase)[0] >= occurrence)
    trial.wait(_after(delay))
    trial.result.injected = launch.poll() is None
    sent = time.monotonic()
    launch.send(number, to_group=number in FROM_TERMINAL)
    trial.wait(lambda: ANNOUNCEMENT in launch.text())
    trial.result.acknowledged = time.monotonic() - sent if trial.result.injected else None
    trial.end(disturbed=True)
    trial.result.fault = f"{number.name} {delay:.3f} s into {phase}"
    if trial.result.injected and phase not in ("start", "end") and launch.code not in (75, OK):
        trial.result.exits.append(f"exit code {launch.code} after {number.name} in {phase}, expected 75")


def _after(seconds: float) -> Callable[[], bool]:
    start = time.monotonic()
    return lambda: time.monotonic() - start >= seconds


def worker(trial: Trial, reference: UninterruptedRun) -> None:
    """A data worker is stopped or killed in the first half of the run; as it starts, if the workers were done by then:
    they are ahead of the training.
    """
    how = (signal.SIGSTOP, signal.SIGKILL)[trial.result.number % 2]
    step, victim = trial.rng.randint(0, reference.step // 2), trial.rng.randint(1, 2) if trial.draw else 0
    workers = WorkerProbe()
    launch = trial.launch(prepare=partial(workers.install, victim, how))
    trial.wait(lambda: trial.probe.read("step")[0] >= step and workers.alive())
    if not victim and launch.poll() is None and (alive := workers.alive()):
        os.kill(trial.rng.choice(alive), how)
    trial.end()
    trial.result.injected = launch.code != OK  # a run whose data was read already needs no worker
    trial.result.fault = f"{how.name} to a data worker {'as it starts' if victim else f'at step {step}'}"
    errors = " ".join(launch.errors())
    if trial.result.injected and "worker" not in errors:
        trial.result.exits.append(f"the error does not name the worker: {errors}")


INJECT: dict[str, Inject] = {"kills": kill, "disk": disk, "flips": flip, "signals": stop, "workers": worker}
