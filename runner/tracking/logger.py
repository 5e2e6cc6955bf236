"""Where the numbers of a run go: the console, metrics.jsonl, and mirrors that can never stop training."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from runner.tracking.console import BAR_FIELDS, MetricValues, format_seconds, format_values, open_console, strip_control
from runner.tracking.jsonl import JsonlLog
from runner.tracking.tracker_process import start_tracker

CONSOLE_MODES = ("auto", "rich", "plain", "quiet")
TRACKER_MODES = ("auto", "online", "offline")


@dataclass
class TrackerConfig:
    name: str  # none | swanlab
    project: str
    mode: str  # auto: online where a key and the network are at hand, else offline
    console: str  # auto: a progress bar on a terminal, one line per log_every when piped

    def __post_init__(self) -> None:
        if self.name not in ("none", "swanlab"):
            raise UserError("unknown tracker", f"tracker.name={self.name}", "choose none or swanlab")
        if self.mode not in TRACKER_MODES:
            raise UserError("unknown tracker mode", f"tracker.mode={self.mode}", f"choose one of {', '.join(TRACKER_MODES)}")
        if self.console not in CONSOLE_MODES:
            raise UserError("unknown console", f"tracker.console={self.console}", f"choose one of {', '.join(CONSOLE_MODES)}")


class RunLogger:
    """The mouth of a run. `metrics.jsonl` is the truth; the console and the mirrors repeat it.

    Only the leading rank has one: with `leads=False` every verb does nothing. Trouble with a file or a tracker is warned of once and
    never stops the training; what the disk refused is tried again, and `position()` raises while it is still missing.
    """

    def __init__(self, folder: Path, cfg: TrackerConfig, leads: bool = True) -> None:
        self.folder = folder
        self.tracker_id: str | None = None  # stored by the engine, so that a resumed run continues the same record
        self._cfg, self._leads = cfg, leads
        self._console = open_console(cfg.console if leads else "quiet")
        self._mirror = start_tracker(cfg.name if leads else "none", folder, self.say, self.warn)
        self._journals: dict[str, JsonlLog] = {}
        self._lock = threading.RLock()  # a mirror speaks from its own thread
        self._total_steps, self._attempt = 0, 1
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None  # step and time of the first logged step: the pace is measured from there
        self._validation = ""
        self._complained = False

    def start(
        self,
        header: Mapping[str, str | int | float],
        *,
        total_steps: int,
        attempt: int,
        run_config: dict,
        resume_at: dict[str, int] | None,
        tracker_id: str | None,
    ) -> None:
        """Open the files and print `header`. `resume_at` is what `position()` returned at the save being resumed; None begins afresh.

        Lines behind that position are moved to `metrics.attempt<N>.jsonl` and `samples.attempt<N>.jsonl`, so no step stands twice.
        Raises ValueError(what, where, fix) where a file is shorter than its position.
        """
        if not self._leads:
            return
        self._total_steps, self._attempt, self._started = total_steps, attempt, time.monotonic()
        for name in ("metrics", "samples"):
            self._journals[name] = JsonlLog(self.folder / f"{name}.jsonl", (resume_at or {}).get(name, 0), attempt)
        width = max((len(word) for word in header), default=0)
        self.say("\n".join(f"{word:<{width}}  {value}" for word, value in header.items()))
        if self._mirror is not None:
            self.tracker_id = tracker_id or secrets.token_hex(8)
            name = "/".join(self.folder.absolute().parts[-2:])
            folder = str(self.folder / self._cfg.name)
            self._mirror.start(folder=folder, project=self._cfg.project, name=name, mode=self._cfg.mode, id=self.tracker_id, config=run_config)
        self._console.begin(total_steps)

    def log(self, kind: str, step: int, **numbers: float) -> None:
        """One line of metrics.jsonl, its fields in the order given; `kind` is train or eval. A number that is not finite is written as null."""
        if not self._leads:
            return
        nonfinite = [name for name, value in numbers.items() if not math.isfinite(value)]
        written: MetricValues = {name: None if name in nonfinite else value for name, value in numbers.items()}
        record: dict[str, object] = {"kind": kind, "step": step, **written, "time": round(self._elapsed(), 3), "attempt": self._attempt}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append("metrics", record)
        self._show(kind, step, written)
        if self._mirror is not None:
            self._mirror.log(kind, step, {name: value for name, value in written.items() if value is not None})

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        """Generated text, each `{"prompt": ..., "answer": ...}`; the console gets it with control characters escaped."""
        if not self._leads:
            return
        for sample in samples:
            self._append("samples", {"step": step, **sample, "attempt": self._attempt})
            self.say(f"sample at step {step}: {_one_line(sample['prompt'])} -> {_one_line(sample['answer'])}")
        if self._mirror is not None:
            self._mirror.text(step, samples)

    def say(self, message: str) -> None:
        """A message for the console and train.log."""
        if self._leads:
            with self._lock:
                text = strip_control(message)
                self._write_down(text)
                self._console.say(text)

    def warn(self, message: str) -> None:
        self.say(f"warning: {message}")

    def position(self) -> dict[str, int]:
        """Bytes of each file, all on the disk; what `start(resume_at=...)` takes. Raises OSError while a line cannot be written."""
        return {name: journal.position() for name, journal in self._journals.items()}

    def finish(self, status: str, summary: Mapping[str, object]) -> None:
        """Close everything. `status` is completed, interrupted or failed; `summary["error"]`, where given, reaches the tracker."""
        if not self._leads:
            return
        self._console.end()
        self.say(" | ".join([f"{status} after {format_seconds(self._elapsed())}", *(f"{name} {_brief(value)}" for name, value in summary.items())]))
        if self._mirror is not None and self.tracker_id is not None:
            self._mirror.finish(status, str(summary.get("error", "")))
        for journal in self._journals.values():
            journal.close()
        self._journals = {}

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show(self, kind: str, step: int, numbers: MetricValues) -> None:
        where = f"step {step}/{self._total_steps} {100 * step / max(1, self._total_steps):.1f}%"
        if kind == "eval":
            loss = numbers.get("loss")
            self._validation = "" if loss is None else f"val {loss:.2f}@{step}"
            return self.say(f"{where} | validation | {format_values(numbers, '')}")
        eta = self._eta(step)
        line = f"{where} | {format_values(numbers, self._validation)}{eta}"
        shown = format_values({name: numbers[name] for name in BAR_FIELDS if name in numbers}, "") + eta
        with self._lock:
            self._write_down(line)
            self._console.progress(step, line, shown)

    def _eta(self, step: int) -> str:
        if self._first is None:
            self._first = (step, self._elapsed())
        first_step, first_time = self._first
        if step == first_step:
            return ""
        pace = (self._elapsed() - first_time) / (step - first_step)
        return f" | eta {format_seconds(pace * max(0, self._total_steps - step))}"

    def _append(self, name: str, record: dict[str, object]) -> None:
        try:
            self._journals[name].append(record)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self.warn(f"{name}.jsonl cannot be written ({error}); its lines are kept in memory and tried again")

    def _write_down(self, text: str) -> None:
        try:
            with open(self.folder / "train.log", "a", encoding="utf-8") as log:
                log.write(text + "\n")
        except OSError:
            # A log that cannot be written is no reason to stop; the console has the same lines.
            return


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
