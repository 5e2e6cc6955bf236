"""The first steps of a planned run, really run in a child process with a temporary folder in the token cache: `python
runner/planning/trial.py FOLDER`.

The child reads FOLDER/trial.json and writes FOLDER/result.json. The folder is removed by the process that started it.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started by path: replace runner/planning/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")

import dataclasses
import glob
import itertools
import shutil
import signal
import socket
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import TrainingError, UserError
from common.filesystem import make_dirs, read_json_object, write_json
from common.guarded_files import last_lines
from common.registry import import_inherited_plugins
from runner.engine.config import Config
from runner.engine.device.spinning import adapt_spinning, set_wait_policy
from runner.launch.subprocesses import failure_reason, spawn
from runner.launch.train_process import config_from_json
from runner.run_dir.metadata import RunMetadata
from runner.tracking.config import TrackerConfig
from runner.tracking.progress import folder_bytes

if TYPE_CHECKING:
    from runner.engine.state import TrainState

TIMED_STEPS = 3  # after the first one, which also allocates memory and compiles
TIMED_MICRO_BATCHES = 4  # of a step; the time of the others is added
TIMED_EVAL_BATCHES = 16
TRIAL_LOG_BYTES = 1 << 16  # of the output of a trial that failed
SECONDS = 60.0  # after which no further step is timed


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
        code = _run_child(Path(folder), log)
        result = read_json_object(Path(folder) / "result.json")
        if error := result.get("error"):
            raise UserError(*error)
        if code or not result:
            reason = failure_reason(code, {}, last_lines(log, TRIAL_LOG_BYTES))
            raise TrainingError(f"the trial of the first steps failed: {reason}; timing=false estimates without it")
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


def _run_child(folder: Path, log: Path) -> int:
    with log.open("wb") as out:
        child = spawn([__file__, str(folder)], {}, out.fileno())
        try:
            return child.wait()
        except BaseException:  # Ctrl-C: the child has a process group of its own
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise


def run_trial_process(folder: Path) -> None:
    set_wait_policy()
    import_inherited_plugins()
    request = folder / "trial.json"
    try:
        with adapt_spinning():
            result = run_trial(config_from_json(read_json_object(request)["config"], request), folder / "run")
    except UserError as error:
        result = {"error": [error.message, error.setting, error.fix]}
    write_json(folder / "result.json", result)


def run_trial(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Return seconds by what they were spent on, bytes of a checkpoint, and the peak of the memory (bytes)."""
    from runner.engine.build import build_run
    from runner.engine.step_metrics import peak_memory

    run_dir.mkdir()
    state = build_run(cfg, RunMetadata.detached(run_dir, 1))
    try:
        result = {
            **time_steps(state),
            **time_evaluation(state),
            "sample_seconds": time_sample(state),
            **time_save(state),
        }
    finally:
        state.checkpoints.close()
    return result | {"compile": state.compile_decision.reason, "peak_bytes": peak_memory(state.dist.device)}


def time_steps(state: TrainState) -> dict[str, Any]:
    from runner.engine.loop import step_with_retries
    from runner.engine.optim.schedules import lr_at
    from runner.engine.step_metrics import flush_steps
    from runner.planning.facts import longest_batch

    cfg, seconds, started = state.cfg, list[float](), time.perf_counter()
    micro_batches = -(-state.loader.sampler.global_batch_size // cfg.train.batch_size)
    batch = longest_batch(state.loader, state.total_steps)
    batches = [batch] * min(micro_batches, TIMED_MICRO_BATCHES)
    while len(seconds) < 1 + TIMED_STEPS and (len(seconds) < 2 or time.perf_counter() - started < SECONDS):
        before = time.perf_counter()
        step_with_retries(state, batches, lr_at(0, state.total_steps, cfg.optimizer.lr, cfg.schedule))
        flush_steps(state)  # waits for the device
        seconds.append(time.perf_counter() - before)
    return {
        "first_step_seconds": seconds[0],
        "step_seconds": statistics.median(seconds[1:]) * micro_batches / len(batches),
        "timed_steps": len(seconds) - 1,
        "step_tokens": batch.input_ids.numel() * micro_batches,
    }


def time_evaluation(state: TrainState) -> dict[str, float]:
    """Return the seconds of an evaluation: of generated answers, and of some batches, times their number."""
    import torch

    from runner.engine.evaluation import generated_metrics

    start = time.perf_counter()
    for name in state.val_loaders:
        generated_metrics(state, name)
    count, before = 0, time.perf_counter()
    state.model.eval()
    for loader in state.val_loaders.values():
        with torch.no_grad(), closing(loader.iter_epoch(0)) as steps:
            for batch in itertools.islice(itertools.chain.from_iterable(steps), TIMED_EVAL_BATCHES):
                with state.precision.autocast():
                    float(state.objective.loss(state.model, batch.to(state.dist.device))["loss"])
                count += 1
    total = sum(loader.steps_per_epoch for loader in state.val_loaders.values())
    return {"eval_seconds": (time.perf_counter() - before) * total / max(1, count) + before - start}


def time_sample(state: TrainState) -> float:
    from runner.engine.evaluation import generate_samples

    if not state.cfg.train.sample_prompts:
        return 0.0
    before = time.perf_counter()
    generate_samples(state)
    return time.perf_counter() - before


def time_save(state: TrainState) -> dict[str, Any]:
    from runner.checkpoint.manager import newest_checkpoint

    before = time.perf_counter()
    state.checkpoints.save_async(state.progress.step, state)
    stall = time.perf_counter() - before  # training waits for the copy only
    state.checkpoints.save_blocking(state.progress.step, state)
    size = folder_bytes(newest_checkpoint(state.run_dir))
    return {"save_stall_seconds": stall, "save_seconds": time.perf_counter() - before, "checkpoint_bytes": size}


if __name__ == "__main__":
    run_trial_process(Path(sys.argv[1]))
