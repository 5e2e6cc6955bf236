"""Start the trial of a planned run in a child process, with a temporary folder in the token cache, and read its result."""

from __future__ import annotations

import dataclasses
import glob
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from common.errors import TrainingError, UserError
from common.filesystem import make_dirs, read_json_object, write_json
from common.paths import REPO_ROOT
from runner.engine.config import Config
from runner.launch.subprocesses import child_env, failure_reason, last_lines, spawn
from runner.tracking.config import TrackerConfig

TRIAL = REPO_ROOT / "runner" / "planning" / "trial" / "process.py"


def trial_of(cfg: Config) -> dict[str, Any]:
    """Return the result of the trial with these settings.

    Raises UserError where the run refuses its settings, TrainingError where it fails.
    """
    tracker = TrackerConfig(name="none", page=False, console="quiet")
    cfg = dataclasses.replace(
        cfg, tracker=tracker, train=dataclasses.replace(cfg.train, verify_resume=False, supervise=False)
    )
    cache = Path(cfg.data.cache)
    make_dirs(cache)
    remove_leftovers(cache)
    with tempfile.TemporaryDirectory(prefix=f"{_prefix()}{os.getpid()}-", dir=cache) as folder:
        write_json(Path(folder) / "trial.json", {"config": dataclasses.asdict(cfg)})
        log = Path(folder) / "trial.log"
        code = _run([str(TRIAL), folder], log)
        result = read_json_object(Path(folder) / "result.json")
        if error := result.get("error"):
            raise UserError(*error)
        if code or not result:
            lines = last_lines(log)
            raise TrainingError(
                f"the trial of the first steps failed: {failure_reason(code, {}, lines)}; timing=false estimates without it"
            )
    return result


def remove_leftovers(cache: Path) -> None:
    """Delete the folders of trials whose process was killed on this machine."""
    for folder in cache.glob(f"{glob.escape(_prefix())}*"):
        pid = folder.name.removeprefix(_prefix()).partition("-")[0]
        if (
            pid.isdigit()
            and not folder.is_symlink()
            and not Path(f"/proc/{pid}").exists()
            and Path("/proc/self").exists()
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"plan-{socket.gethostname()}-"


def _run(program: list[str], log: Path) -> int:
    with log.open("wb") as out:
        child: subprocess.Popen = spawn(program, child_env(), out.fileno())
        try:
            return child.wait()
        except BaseException:  # Ctrl-C: the child has a process group of its own
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
