"""Logger of a run: metrics.jsonl (source of truth), samples.jsonl, train.log, the console and an external tracker."""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.errors import LostRunDirError, TrainingError, strip_control
from common.filesystem import describe_disk_error, retry_disk
from common.guarded_files import open_append
from runner.tracking.config import TrackerConfig
from runner.tracking.console import BAR_FIELDS, MetricValues, format_seconds, format_values, open_console
from runner.tracking.jsonl import JsonlLog
from runner.tracking.log_recovery import LogProof
from runner.tracking.tracker_process import TrackerProcess

MAX_UNWRITTEN_BYTES = 1 << 20  # of lines for train.log that are kept while the disk refuses them


class RunLogger:
    """Writes metrics to metrics.jsonl, the console and the tracker; on ranks other than 0 every method does nothing.

    An error of a file or a tracker is reported once and never stops training. Records that could not be written are retried, and
    `position()` raises as long as one is missing.
    """

    def __init__(self, run_dir: Path, config: TrackerConfig, is_rank_zero: bool = True) -> None:
        self.run_dir = run_dir
        self.check_run_dir: Callable[[], None] = lambda: None  # raises TrainingError if the run directory no longer belongs to this process
        self.after_record: Callable[[], None] = lambda: None  # called after each record of metrics.jsonl
        self.watch_record: Callable[[Mapping[str, object]], None] = lambda record: None  # gets each record of metrics.jsonl, and may warn
        self.tracker_id: str | None = None  # saved in checkpoints, so that a resumed run continues the same record
        self._config, self._is_rank_zero = config, is_rank_zero
        self._console = open_console(config.console if is_rank_zero else "quiet")
        command = config.command() if is_rank_zero else None
        self._tracker = TrackerProcess(command, run_dir / config.name / "tracker.log", self.info, self.warning) if command else None
        self._files: dict[str, JsonlLog] = {}
        self._lock = threading.RLock()  # the tracker reports from its own thread
        self._total_steps, self._attempt = 0, 1
        self._started = time.monotonic()
        self._first_logged: tuple[int, float] | None = None  # (step, seconds) of the first logged step: start of the measurement for the eta
        self._validation = ""
        self._has_write_error = False
        self._unwritten_lines = b""  # of train.log

    def start(
        self,
        header: Mapping[str, str | int | float],
        *,
        total_steps: int,
        attempt: int,
        run_config: dict,
        resume_at: dict[str, int] | None,
        tracker_id: str | None,
        proof: LogProof | None = None,
    ) -> list[str]:
        """Open the files and print `header`. `resume_at` is the result of `position()` at the checkpoint being resumed; None: a new run.

        Records after that position are moved to `metrics.attempt<N>.jsonl` and `samples.attempt<N>.jsonl`, so that no step is in a file twice.
        Returns a message for each file that is not what `proof`, the checkpoint, knows of it; it is also printed.
        """
        if not self._is_rank_zero:
            return []
        self._total_steps, self._attempt, self._started = total_steps, attempt, time.monotonic()
        for name in ("metrics", "samples"):
            self._files[name] = retry_disk(partial(JsonlLog, self.run_dir / f"{name}.jsonl", (resume_at or {}).get(name, 0), attempt, proof))
        width = max((len(key) for key in header), default=0)
        self.info("\n".join(f"{key:<{width}}  {value}" for key, value in header.items()))
        recovered = [file.recovered for file in self._files.values() if file.recovered]
        for message in recovered:
            self.warning(message)
        if self._tracker is not None:
            self.tracker_id = tracker_id or secrets.token_hex(8)
            name = "/".join(self.run_dir.absolute().parts[-2:])
            folder, settings = str(self.run_dir / self._config.name), dataclasses.asdict(self._config)
            self._tracker.start(folder=folder, name=name, id=self.tracker_id, settings=settings, config=run_config)
        self._console.start(total_steps)
        return recovered

    def log(self, kind: str, step: int, **numbers: float) -> None:
        """Append a record to metrics.jsonl, its fields in the given order; `kind` is train or eval. A non-finite number is written as null."""
        if not self._is_rank_zero:
            return
        nonfinite = [name for name, value in numbers.items() if not math.isfinite(value)]
        values: MetricValues = {name: None if name in nonfinite else value for name, value in numbers.items()}
        record: dict[str, object] = {"kind": kind, "step": step, **values, "time": round(self._elapsed(), 3), "attempt": self._attempt}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append("metrics", record)
        self._show(kind, step, values)
        if self._tracker is not None:
            self._tracker.log(kind, step, {name: value for name, value in values.items() if value is not None})
        self.watch_record(record)
        self.after_record()

    def show_evaluation(self, done: int, total: int) -> None:
        """Show on the console that `done` of `total` batches of an evaluation are done."""
        if self._is_rank_zero:
            with self._lock:
                self._console.show_evaluation(done, total)

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        """Record generated text, each `{"prompt": ..., "answer": ...}`; on the console control characters are escaped."""
        if not self._is_rank_zero:
            return
        for sample in samples:
            self._append("samples", {"step": step, **sample, "attempt": self._attempt})
            prompt, answer = (sample[key].replace("\n", "\\n") for key in ("prompt", "answer"))
            self.info(f"sample at step {step}: {prompt} -> {answer}")
        if self._tracker is not None:
            self._tracker.samples(step, samples)

    def info(self, message: str) -> None:
        """Write a message to the console and train.log."""
        if self._is_rank_zero:
            with self._lock:
                text = strip_control(message)
                self._append_to_log(text)
                self._console.print(text)

    def warning(self, message: str) -> None:
        self.info(f"warning: {message}")

    def position(self) -> dict[str, int]:
        """Return the length of each file in bytes, all synced: `resume_at` of `start()`. Raises OSError while a record cannot be written."""
        for file in self._files.values():
            if change := retry_disk(file.restore_path):
                self.warning(change)
        return {name: retry_disk(file.position) for name, file in self._files.items()}

    def move_to(self, run_dir: Path) -> None:
        """Follow the files, which are open, to the folder that they were moved to."""
        self.run_dir = run_dir
        for file in self._files.values():
            file.path = run_dir / file.path.name

    def checksums(self) -> dict[str, str]:
        """Return the sha256 of each file up to its `position()`."""
        return {name: file.checksum() for name, file in self._files.items()}

    def flush(self) -> None:
        """Write and sync every record. Raises TrainingError if the disk refuses."""
        try:
            self.position()
            retry_disk(self._write_lines)
        except OSError as error:
            raise TrainingError(f"the last records of the run's logs could not be written: {describe_disk_error(error, self.run_dir)}") from error

    def finish(self, status: str, summary: Mapping[str, object]) -> None:
        """Close everything. `status`: completed, interrupted or failed. `summary["error"]`, if given, is passed to the tracker."""
        if not self._is_rank_zero:
            return
        self._console.stop()
        values = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in summary.items())
        self.info(" | ".join([f"{status} after {format_seconds(self._elapsed())}", *values]))
        if self._unwritten_lines:
            with suppress(OSError, TrainingError):  # the console has the same lines
                retry_disk(self._write_lines)
        if self._tracker is not None and self.tracker_id is not None:
            self._tracker.finish(status, str(summary.get("error", "")))
        for file in self._files.values():
            file.close()
        self._files = {}

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show(self, kind: str, step: int, values: MetricValues) -> None:
        prefix = f"step {step}/{self._total_steps} {100 * step / max(1, self._total_steps):.1f}%"
        if kind == "eval":
            loss = values.get("loss")
            self._validation = "" if loss is None else f"val {loss:.2f}@{step}"
            return self.info(f"{prefix} | validation | {format_values(values, '')}")
        eta = self._eta(step)
        line = f"{prefix} | {format_values(values, self._validation)}{eta}"
        numbers = format_values({name: values[name] for name in BAR_FIELDS if name in values}, "") + eta
        with self._lock:
            self._append_to_log(line)
            self._console.show_step(step, line, numbers)

    def _eta(self, step: int) -> str:
        if self._first_logged is None:
            self._first_logged = (step, self._elapsed())
        first_step, first_time = self._first_logged
        if step == first_step:
            return ""
        seconds_per_step = (self._elapsed() - first_time) / (step - first_step)
        return f" | eta {format_seconds(seconds_per_step * max(0, self._total_steps - step))}"

    def _append(self, name: str, record: dict[str, object]) -> None:
        try:
            self.check_run_dir()
        except LostRunDirError as error:
            if error.moved_to is None:  # the open files move with their directory
                raise
        try:
            self._files[name].append(record)
        except OSError as error:
            if not self._has_write_error:
                self._has_write_error = True
                self.warning(f"{name}.jsonl cannot be written ({error}); its records are kept in memory and retried")

    def _append_to_log(self, text: str) -> None:
        self._unwritten_lines += f"{text}\n".encode()
        try:
            self._write_lines()
        except (OSError, TrainingError):  # the console has the same lines; they are tried again with the next one
            self._unwritten_lines = self._unwritten_lines[-MAX_UNWRITTEN_BYTES:]

    def _write_lines(self) -> None:
        self.check_run_dir()
        with open_append(self.run_dir / "train.log") as log:
            while self._unwritten_lines:
                written = log.write(self._unwritten_lines) or 0
                self._unwritten_lines = self._unwritten_lines[written:]
