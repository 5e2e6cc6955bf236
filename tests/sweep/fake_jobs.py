"""Sweeps whose jobs are a few lines of Python instead of a training: `fake_jobs`, `sweep` and `resume`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.cli.hydra_app import run_hydra as run_sweep
from runner.sweep import command

HEAD = """
import json, os, re, signal, sys, time
run_dir, overrides = sys.argv[1].removeprefix("resume="), sys.argv[2:]
scripts = json.load(open(os.path.join(os.path.dirname(__file__), "scripts.json")))
os.chdir(run_dir)
fields = json.load(open("run.json")) if os.path.exists("run.json") else {"attempt": 0, "step": 0}
def write(status, outcome=None, **more):
    fields.update(status=status, outcome=outcome, overrides=overrides, **more)
    with open("run.json.tmp", "w") as file: json.dump(fields, file)
    os.replace("run.json.tmp", "run.json")
write("running", attempt=fields["attempt"] + 1)
exec(scripts.get(os.path.basename(run_dir), scripts["default"]))
"""
GOOD = "write('completed', 'completed', metrics={'loss': 1.5})"
DIVERGED = "write('failed', 'diverged', error='the loss is not finite'); sys.exit(1)"
REFUSED = "print('error: a row is wrong\\n  where: rows.jsonl:3\\n  fix:   correct it', file=sys.stderr); sys.exit(2)"
BUG = "print('hello'); raise KeyError('missing')"
KILLED = "os.kill(os.getpid(), 9)"
FLAKY = f"if fields['attempt'] == 1: {KILLED}\n{GOOD}"
SAVES = """
def save(*_):
    write('interrupted', 'interrupted'); sys.exit(75)
signal.signal(signal.SIGTERM, save)
open('ready', 'w').close()
time.sleep(60)
"""

HALVED_STEPS = 16
# a job of 16 steps that is evaluated at every second one; its loss is 1000 lr, and falls with the steps
HALVED = f"""
lr = float(dict(pair.split('=') for pair in os.path.basename(run_dir).split(','))['optimizer.lr'])
share = float(dict(each.split('=') for each in overrides).get('train.stop_at', 0))
settings = open('.hydra/config.yaml').read()
with open('.hydra/config.yaml', 'w') as file:
    file.write(re.sub(r'stop_at: \\S+', f'stop_at: {{share}}', settings))
end = int(share * {HALVED_STEPS}) or {HALVED_STEPS}
known = dict(attempts=[{{'total_steps': {HALVED_STEPS}}}], evaluation={{'rows': 50}})
write('running', **known)
with open('metrics.jsonl', 'a') as file:
    for step in range(fields['step'] + 1, end + 1):
        if step % 2 == 0:
            file.write(json.dumps({{'kind': 'eval', 'step': step, 'loss': 1000 * lr + 1 / step}}) + chr(10))
known['step'] = end  # the end
if end < {HALVED_STEPS}:
    write('interrupted', 'paused', **known); sys.exit(75)
write('completed', 'completed', metrics={{'loss': 1000 * lr}}, **known)
"""


FINISHED = ("train.accumulation_steps=1,4", "train.max_steps=60", "train.eval_every=20", "hydra.launcher.workers=2")


class FakeJobs:
    """`script` replaces train.py: it runs the lines of Python that `set` gives to a job, by its name, or to all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.script, self._scripts = folder / "job.py", {"default": GOOD}
        self.script.write_text(HEAD)
        self.set()

    def set(self, default: str | None = None, **scripts: str) -> None:
        self._scripts |= scripts | ({"default": default} if default else {})
        (self.script.parent / "scripts.json").write_text(json.dumps(self._scripts))

    def set_all(self, scripts: dict[str, str]) -> None:
        self.set(**scripts)


@pytest.fixture
def fake_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    jobs = FakeJobs(tmp_path / "jobs")
    monkeypatch.setattr(command, "TRAIN_SCRIPT", str(jobs.script))
    return jobs


def exit_code(action: Callable[[], Any]) -> int:
    try:
        action()
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        return exit.code
    return 0


@pytest.fixture(scope="session")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two completed jobs of train.max_steps=60 with 1 and 4 micro-batches per step; copy it."""
    folder = tmp_path_factory.mktemp("finished")
    jobs = FakeJobs(folder / "jobs")
    jobs.set(default=GOOD.replace("metrics", "step=15 if os.path.basename(run_dir).endswith('4') else 60, metrics"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "TRAIN_SCRIPT", str(jobs.script))
        command.start_sweep([*FINISHED, f"hydra.sweep.dir={folder / 'sweep'}"], {"--multirun": True}, run_sweep)
    return folder / "sweep"


@pytest.fixture
def finished(finished_sweep: Path, tmp_path: Path) -> Path:
    """A copy of `finished_sweep` in tmp_path/sweep, where `resume` continues it."""
    return shutil.copytree(finished_sweep, tmp_path / "sweep")


@pytest.fixture
def sweep(tmp_path: Path, fake_jobs: FakeJobs) -> Callable[..., int]:
    """`sweep("seed=1,2")` starts a sweep in tmp_path/sweep; returns the exit code."""
    return lambda *overrides: exit_code(
        lambda: command.start_sweep(
            [*overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}"], {"--multirun": True}, run_sweep
        )
    )


@pytest.fixture
def resume(tmp_path: Path, fake_jobs: FakeJobs) -> Callable[..., int]:
    """`resume("seed=3")` continues the sweep in tmp_path/sweep; returns the exit code."""
    return lambda *overrides: exit_code(
        lambda: command.resume_sweep(tmp_path / "sweep", list(overrides), {}, run_sweep)
    )


def read_sweep(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())


def read_run(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "run.json").read_text()) if (run_dir / "run.json").exists() else {}


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
