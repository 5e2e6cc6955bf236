"""Logger of a run: metrics.jsonl (source of truth), samples.jsonl, train.log, the console and external trackers."""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from common.errors import LostRunDirError, TrainingError, strip_control
from common.filesystem import describe_disk_error, retry_disk
from common.guarded_files import open_append
from runner.tracking.bar import labelled_lines, open_console
from runner.tracking.config import TrackerConfig
from runner.tracking.data_report import data_table
from runner.tracking.jsonl import JsonlLog, SavedLogs
from runner.tracking.lines import (
    BAR_FIELDS,
    LINE_WIDTH,
    Event,
    MetricValues,
    format_seconds,
    format_values,
    remaining_seconds,
)
from runner.tracking.run_end import RunEnd, finite_json
from runner.tracking.tracker_process import TrackerProcess, describe_experiment, finish_trackers

MAX_UNWRITTEN_BYTES = 1 << 20  # of lines for train.log that are kept while the disk refuses them


class RunLogger:
    """Writes metrics to metrics.jsonl, the console and the tracker; on ranks other than 0 every method does nothing.

    An error of a file or a tracker is reported once and never stops training. Records that could not be written are
    retried, and `position()` raises as long as one is missing.
    """

    def __init__(
        self,
        run_dir: Path,
        config: TrackerConfig,
        is_rank_zero: bool = True,
        check_run_dir: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_run_dir` raises TrainingError if the run directory no longer belongs to this process."""
        self.run_dir, self._check_run_dir = run_dir, check_run_dir
        self.after_record: Callable[[], None] = lambda: None  # called after each record of metrics.jsonl
        # gets each record of metrics.jsonl, and may warn
        self.watch_record: Callable[[Mapping[str, object]], None] = lambda record: None
        self.tracker_id: str | None = None  # saved in checkpoints, so that a resumed run continues the same record
        self._config, self._is_rank_zero = config, is_rank_zero
        self._console = open_console(config.console if is_rank_zero else "quiet")
        self._trackers = {
            tracker.name: TrackerProcess(command, run_dir / tracker.name, self.info, self.warning)
            for tracker in config.selected()
            if is_rank_zero and (command := tracker.command())
        }
        self._files: dict[str, JsonlLog] = {}
        self._lock = threading.RLock()  # the tracker reports from its own thread
        self._total_steps, self._attempt = 0, 1
        self.warnings = 0  # so far
        self._tokens = self._first_tokens = 0  # as of the newest logged step, and of the start of this attempt
        self._training_seconds = 0.0  # of the logged steps, as tokens_per_second measures them
        self._started = time.monotonic()
        # (step, seconds) of the first logged step: start of the measurement for the eta
        self._first_logged: tuple[int, float] | None = None
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
        saved: SavedLogs | None,
        tracker_id: str | None,
        first_step: int = 0,
        first_tokens: int = 0,
    ) -> list[str]:
        """Open the files and print `header`; `first_step`, `first_tokens`: what is done already.

        `saved`: what the checkpoint being resumed knows of the logs; None: a new run.

        Records after that are moved to `metrics.attempt<N>.jsonl` and `samples.attempt<N>.jsonl`, so that no step is in
        a file twice. Returns a message for each file that is not what the checkpoint knows of it; it is also printed.
        """
        if not self._is_rank_zero:
            return []
        self._total_steps, self._attempt, self._started = total_steps, attempt, time.monotonic()
        self._tokens = self._first_tokens = first_tokens
        for name in ("metrics", "samples"):
            self._files[name] = retry_disk(
                partial(JsonlLog, self.run_dir / f"{name}.jsonl", attempt, saved or SavedLogs())
            )
        rows = {key: strip_control(str(value)) for key, value in header.items()}
        about_run = {"run": str(self.run_dir), "step": first_step, "total_steps": total_steps, "attempt": attempt}
        with self._lock:
            self._append_to_log("\n".join(labelled_lines(rows.items())))
            lines = labelled_lines(rows.items(), self._console.width)
            self._console.show("start", {**about_run, "header": rows}, "\n".join(lines))
        recovered = [file.recovered for file in self._files.values() if file.recovered]
        for message in recovered:
            self.warning(message)
        if self._trackers:
            self.tracker_id = tracker_id or secrets.token_hex(8)
            about = {
                "id": self.tracker_id,
                "config": run_config,
                "history": saved and saved.positions,
                **describe_experiment(self.run_dir, run_config),
            }
            for config in self._config.selected():
                if tracker := self._trackers.get(config.name):
                    tracker.start(settings=dataclasses.asdict(config), **about)
        return recovered

    def _show(self, name: str, event: Event, text: str, numbers: str = "") -> None:
        """Write `text` to train.log, and show it or the event on the console."""
        if self._is_rank_zero:
            with self._lock:
                self._append_to_log(text)
                self._console.show(name, event, text, numbers)

    def show_data(self, files: list[dict[str, Any]]) -> None:
        """Print the counts of the data files, as run.json has them."""
        if self._is_rank_zero:
            self._show("data", {"files": files}, strip_control(data_table(files)))

    def log(self, kind: str, step: int, **numbers: float) -> None:
        """Append a record to metrics.jsonl, its fields in the given order; `kind` is train or eval.

        A non-finite number is written as null.
        """
        if not self._is_rank_zero:
            return
        nonfinite = [name for name, value in numbers.items() if not math.isfinite(value)]
        values: MetricValues = {name: None if name in nonfinite else value for name, value in numbers.items()}
        record: dict[str, object] = {
            "kind": kind,
            "step": step,
            **values,
            "time": round(self._elapsed(), 3),
            "attempt": self._attempt,
        }
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append("metrics", record)
        self._measure(values)
        self._show_record(record, values)
        finite = {name: value for name, value in values.items() if value is not None}
        self._send("log", kind=kind, step=step, numbers=finite)
        self.watch_record(record)
        self.after_record()

    def show_activity(self, name: str, done: int, total: int, unit: str) -> None:
        """Show on the console that `done` of `total` units of something between two steps are done, from 0 to all of
        them.
        """
        event, numbers = {"activity": name, "done": done, "total": total, "unit": unit}, f"{done:,}/{total:,} {unit}"
        with self._lock:
            self._console.show("progress", event, f"{name}: {done:,} of {total:,} {unit}", f"{name} {numbers}")

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        """Record generated text, each `{"prompt": ..., "answer": ...}`; on the console control characters are escaped."""
        if not self._is_rank_zero:
            return
        for sample in samples:
            record: dict[str, object] = {"step": step, **sample, "attempt": self._attempt}
            self._append("samples", record)
            prompt, answer = (sample[key].replace("\n", "\\n") for key in ("prompt", "answer"))
            self._show("sample", record, strip_control(f"sample at step {step}: {prompt} -> {answer}"))
        self._send("samples", step=step, samples=samples)

    def _send(self, event: str, **fields: object) -> None:
        for tracker in self._trackers.values():
            tracker.send(event, **fields)

    def info(self, message: str) -> None:
        """Write a message to the console and train.log."""
        text = strip_control(message)
        self._show("message", {"text": text}, text)

    def warning(self, message: str) -> None:
        """Write a warning to the console and train.log, and count it for the end of the run."""
        text = strip_control(message)
        with self._lock:
            self.warnings += 1
            self._show("warning", {"text": text}, f"warning: {text}")

    def position(self) -> dict[str, int]:
        """Return the length of each file in bytes, all synced.

        Raises OSError while a record cannot be written.
        """
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
            raise TrainingError(
                f"the last records of the run's logs could not be written: {describe_disk_error(error, self.run_dir)}"
            ) from error

    def finish(self, status: str, end: RunEnd | None = None, error: str = "") -> None:
        """Close everything.

        `status`: completed, interrupted or failed. `end`: what the last lines say of the run; None: only the status.
        """
        if not self._is_rank_zero:
            return
        with self._lock:
            self._console.stop()
            self._print_end(status, end, error)
        if self._unwritten_lines:
            with suppress(OSError, TrainingError):  # the console has the same lines
                retry_disk(self._write_lines)
        if self.tracker_id is not None:
            finish_trackers(self._trackers.values(), status, error)
        for file in self._files.values():
            file.close()
        self._files = {}

    def _print_end(self, status: str, end: RunEnd | None, error: str) -> None:
        first = f"{status} after {format_seconds(self._elapsed())}"
        event = {"status": status, "seconds": round(self._elapsed(), 3)}
        if end is None:
            return self._show("end", event, first)
        end = dataclasses.replace(end, warnings=self.warnings, tokens_per_second=self._mean_rate())
        summary = {name: value for name, value in {**end.metrics, "error": error or None}.items() if value is not None}
        event |= {name: finite_json(value) for name, value in summary.items()} | end.event()
        if end.is_job:
            values = (
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in summary.items()
            )
            return self._show("end", event, strip_control(" | ".join([first, *values])))
        self._append_to_log("\n".join([first, *end.lines(LINE_WIDTH)]))
        self._console.show("end", event, "\n".join([first, *end.lines(self._console.width)]))

    def _measure(self, values: MetricValues) -> None:
        """Add the steps since the last record to the mean of tokens_per_second."""
        tokens, rate = values.get("tokens"), values.get("tokens_per_second")
        if tokens is not None and rate:
            self._training_seconds += (tokens - self._tokens) / rate
            self._tokens = int(tokens)

    def _mean_rate(self) -> float | None:
        """Return the tokens per second of all logged steps of this attempt, without saves, evaluation and samples."""
        return (self._tokens - self._first_tokens) / self._training_seconds if self._training_seconds > 0 else None

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show_record(self, record: dict[str, Any], values: MetricValues) -> None:
        step: int = record["step"]
        prefix = f"step {step}/{self._total_steps} {100 * step / max(1, self._total_steps):.1f}%"
        if record["kind"] == "eval":
            loss = values.get("loss")
            self._validation = "" if loss is None else f"val {loss:.2f}@{step}"

            def set_of(name: str) -> str:  # loss/law is the loss of the set law
                field, _, set_name = name.rpartition("/")
                return set_name if field in values else ""

            lines = [
                f"{prefix} | {f'validation {name}'.strip()} | {format_values({field.removesuffix(f'/{name}'): value for field, value in numbers}, '')}"
                for name, numbers in groupby(values.items(), lambda item: set_of(item[0]))
            ]
            # the numbers of the first of several sets are there by its name, too
            return self._show("eval", record, "\n".join(lines[1:] or lines))
        eta = self._eta(step)
        numbers = format_values({name: values[name] for name in BAR_FIELDS if name in values}, "") + eta
        self._show("step", record, f"{prefix} | {format_values(values, self._validation)}{eta}", numbers)

    def _eta(self, step: int) -> str:
        if self._first_logged is None:
            self._first_logged = (step, self._elapsed())
        seconds = remaining_seconds(self._first_logged, (step, self._elapsed()), self._total_steps)
        return "" if seconds is None else f" | eta {format_seconds(seconds)}"

    def _append(self, name: str, record: dict[str, object]) -> None:
        try:
            self._check_run_dir()
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
        self._check_run_dir()
        with open_append(self.run_dir / "train.log") as log:
            while self._unwritten_lines:
                written = log.write(self._unwritten_lines) or 0
                self._unwritten_lines = self._unwritten_lines[written:]
