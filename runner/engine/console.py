"""What a person sees while a run goes on: a pinned bar on a terminal, plain lines everywhere else."""

from __future__ import annotations

import io
import sys
import time
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Numbers = Mapping[str, int | float | None]

# How a number is shown; one that is not named here is shown as `name value`.
SHOWN = {
    "loss": "loss {:.3f}",
    "lr": "lr {:.1e}",
    "grad_norm": "gnorm {:.2f}",
    "perplexity": "perplexity {:.4g}",
}
BESIDE_A_BAR = ("loss", "lr", "tokens_per_second")
HIDDEN = ("epoch", "tokens", "tokens_per_second", "data_wait", "save_stall")
# Format characters (direction overrides among them), surrogates and unassigned codes may rewrite a terminal as control codes do.
UNSAFE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def clean(text: str) -> str:
    """Text of any origin, safe to print: line ends and tabs stay, other control and format characters become escapes."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in UNSAFE else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def describe(numbers: Numbers, validation: str) -> str:
    """`loss 3.412 | val 3.50@100 | lr 4.9e-04 | 41.2k tok/s`; `validation` stands right behind the loss."""
    parts = []
    for name, value in numbers.items():
        if name in HIDDEN:
            continue
        parts.append(f"{name} not finite" if value is None else SHOWN.get(name, name + " {:.4g}").format(value))
        if name == "loss" and validation:
            parts.append(validation)
    speed = numbers.get("tokens_per_second")
    if speed is not None:
        parts.append(f"{speed / 1000:.1f}k tok/s" if speed >= 1000 else f"{speed:.0f} tok/s")
    return " | ".join(parts)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"


class Quiet:
    """No output; the files of the run say everything. Also the interface of a console."""

    def begin(self, total_steps: int) -> None: ...

    def progress(self, step: int, line: str, shown: str) -> None:
        """One logged step: `line` is the whole plain line, `shown` the few numbers that fit beside a bar."""

    def say(self, text: str) -> None: ...

    def end(self) -> None: ...


class Plain(Quiet):
    """One line a message, no control codes: for pipes, files and logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def progress(self, step: int, line: str, shown: str) -> None:
        self.say(line)

    def say(self, text: str) -> None:
        if self._stream is None:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            print(text.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):
            # The reader went away (a closed pipe, a lost terminal). Training does not: train.log has every line.
            self._stream = None


class Bar(Quiet):
    """One pinned progress bar; messages scroll past above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # Four turns a second are enough for the eye and leave the cores to the training.
        steps = TextColumn("{task.completed}/{task.total}", table_column=Column(no_wrap=True))
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4))  # it gives way, the numbers do not
        numbers = TextColumn("{task.fields[shown]}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(steps, bar, numbers, console=self._console, refresh_per_second=4, expand=True)
        self._task = self._bar.add_task("train", total=total_steps, shown="")
        self._bar.start()

    def progress(self, step: int, line: str, shown: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, shown=shown)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def open_console(mode: str, stream: TextIO | None = None) -> Quiet:
    stream = stream or sys.stdout
    if mode == "quiet":
        return Quiet()
    if mode == "rich" or (mode == "auto" and stream.isatty()):
        return Bar(stream)
    return Plain(stream)


class _Unread(io.FileIO):
    """A stream whose reader may go away, as `tee` does at Ctrl-C: then nobody reads on, and nothing fails for it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """From here on no lost pipe or terminal ends this program; what it has to say stands in its files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):  # not where somebody has put one of their own
            raw = _Unread(stream.fileno(), "w", closefd=False)
            told_at_once = stream.line_buffering or stream.write_through
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=told_at_once))


class Meter:
    """How far a long preparation is: called with (bytes done, bytes in all, rows done). What is over in two seconds shows nothing."""

    PATIENCE, EVERY = 2.0, 10.0  # seconds before the first word, and between two lines where there is no terminal

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title, self._stream = clean(title), stream or sys.stderr
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Meter:
        return self

    def __call__(self, done: int, total: int, rows: int) -> None:
        now, terminal = time.monotonic(), self._stream.isatty()
        seconds = now - self._began
        if seconds < self.PATIENCE or (not terminal and now - self._told < self.EVERY and self._told > self._began):
            return
        self._told = now
        share = min(done / max(total, 1), 1.0)
        eta = clock(seconds / share - seconds) if share else "?"
        line = f"{self._title}: {100 * share:.0f}%, {rows:,} rows, {rows / seconds:,.0f} rows/s, eta {eta}"
        print(f"\r{line}\x1b[K" if terminal else line, end="" if terminal else "\n", file=self._stream, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._stream.isatty() and self._told > self._began:
            print(file=self._stream)
