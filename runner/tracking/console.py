"""Console output of a run: a progress bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

MetricValues = Mapping[str, int | float | None]

CONSOLE_MODES = ("auto", "rich", "plain", "quiet")
# How a metric is printed; one that is not listed is printed as `name value`.
VALUE_FORMATS = {
    "loss": "loss {:.3f}",
    "lr": "lr {:.1e}",
    "grad_norm": "gnorm {:.2f}",
    "perplexity": "perplexity {:.4g}",
}
BAR_FIELDS = ("loss", "lr", "tokens_per_second")
EVALUATION_INTERVAL = 10.0  # seconds between two lines about a running evaluation
HIDDEN_FIELDS = ("epoch", "loss_tokens", "tokens", "tokens_per_second", "data_wait", "save_stall")


def format_values(numbers: MetricValues, validation: str) -> str:
    """Return `loss 3.412 | val 3.50@100 | lr 4.9e-04 | 41.2k tok/s`; `validation` is inserted after the loss."""
    parts = []
    for name, value in numbers.items():
        if name in HIDDEN_FIELDS:
            continue
        parts.append(f"{name} not finite" if value is None else VALUE_FORMATS.get(name, name + " {:.4g}").format(value))
        if name == "loss" and validation:
            parts.append(validation)
    speed = numbers.get("tokens_per_second")
    if speed is not None:
        parts.append(f"{speed / 1000:.1f}k tok/s" if speed >= 1000 else f"{speed:.0f} tok/s")
    return " | ".join(parts)


def format_seconds(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"


class NullConsole:
    """No output. Also the interface of a console."""

    def start(self, total_steps: int) -> None: ...

    def show_step(self, step: int, line: str, numbers: str) -> None:
        """Show a logged step: `line` is the whole plain line, `numbers` the few values that fit next to a bar."""

    def show_evaluation(self, done: int, total: int) -> None:
        """Show that `done` of `total` batches of an evaluation are done, from 0 to all of them."""

    def print(self, text: str) -> None: ...

    def stop(self) -> None: ...


class PlainConsole(NullConsole):
    """One line per message, without control codes: for pipes, files and logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._evaluation_shown = 0.0  # when a running evaluation began, or was last mentioned

    def show_step(self, step: int, line: str, numbers: str) -> None:
        self.print(line)

    def show_evaluation(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0:
            self._evaluation_shown = now
        elif done < total and now - self._evaluation_shown >= EVALUATION_INTERVAL:
            self._evaluation_shown = now
            self.print(f"validation: {done:,} of {total:,} batches")

    def print(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):
            self._stream = None  # a closed pipe or terminal must not stop training; train.log has every line


class RichConsole(NullConsole):
    """A progress bar fixed at the bottom; messages scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._numbers = ""  # of the newest logged step

    def start(self, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        steps = TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True))
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))  # on a narrow terminal the bar shrinks, not the numbers
        numbers = TextColumn("{task.fields[numbers]}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(steps, bar, numbers, console=self._console, refresh_per_second=4, expand=True)  # a faster refresh takes CPU time from training
        self._task = self._bar.add_task("train", total=total_steps, numbers="")
        self._bar.start()

    def show_step(self, step: int, line: str, numbers: str) -> None:
        self._numbers = numbers
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)

    def show_evaluation(self, done: int, total: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, numbers=f"validation {done:,}/{total:,}" if done < total else self._numbers)

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def open_console(mode: str, stream: TextIO | None = None) -> NullConsole:
    stream = stream or sys.stdout
    if mode == "quiet":
        return NullConsole()
    if mode == "rich" or (mode == "auto" and stream.isatty()):
        return RichConsole(stream)
    return PlainConsole(stream)
