"""`--cfg job` and `--info` of a sweep: of the job that resume= would run next. Nothing is written, and no lock is taken."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from runner.launch import grid, relaunch, snapshot, sweep
from runner.launch.accept import HYDRA
from runner.launch.compose import register
from runner.launch.ledger import Job, Ledger, begun, read_run
from runner.launch.underway import Sweep, is_due
from runner.launch.words import quoted


def at_sweep(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """The words of one job, with what the extra words would change in it; values of swept words choose the job."""
    ledger = Ledger.peek(folder)
    with snapshot.laid_out(folder) as conf:
        more, added = sweep.asked(ledger, extra, conf)
        plain = [word for word in more if not word.startswith(HYDRA)]
        ledger.fields["words"] = grid.with_words(ledger.fields["words"], more)
        job = _meant(ledger, {key: values[0] for key, values in added.items()})
        print(f"resume: one job of this sweep: {job['name']}{_another(ledger, job)}", file=sys.stderr)
        found, run = Sweep(ledger, conf), folder / job["name"]
        if begun(read_run(run)):
            plan = relaunch.planned(run, sweep.pending(found, job, plain))
            relaunch.say(plan)
            return relaunch.looked_at(plan, flags, app)
        register()
        sys.argv[1:] = [*flags, "--config-path", str(conf), *found.plain_words(job), f"hydra.run.dir={quoted(str(run))}"]
        app()


def _meant(ledger: Ledger, values: dict[str, str]) -> Job:
    """The first that is not finished, or else the first; with these values of swept words."""
    job = next(filter(is_due, ledger.jobs), ledger.jobs[0] if ledger.jobs else None)
    if job is None:
        words = shlex.join(word for word in ledger.fields["words"] if not word.startswith(HYDRA))
        raise ValueError(
            "no job of this sweep has been chosen yet", f"resume={ledger.folder}", f"look at what they share: python runner/train.py {words} --cfg job"
        )
    return ledger.add(job["words"] | values)


def _another(ledger: Ledger, job: Job) -> str:
    name = next((other["name"] for other in ledger.jobs if other is not job and read_run(ledger.folder / other["name"])), None)
    return f"; another: {shlex.quote(f'resume={ledger.folder / name}')}" if name else ""
