"""Runs hostile cases: a command on harmful files, in a forked process with an audit hook, a deadline and a memory
limit.

A case passes if the command ends as the table says and nothing of this is seen: code of the case that runs, a file that
changes outside of its folder, a raw control character or a traceback in what is printed or logged, more than
MAX_SECONDS of processor time or MAX_BYTES of memory. A case that waits is ended at DEADLINE.
"""

from __future__ import annotations

import os
import resource
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from audit import Audit

from common import paths
from common.errors import strip_control

ROOT = Path(__file__).resolve().parents[2]
MAX_SECONDS, DEADLINE, MAX_BYTES = 10.0, 100.0, 1 << 30
ADDRESS_SPACE = 6 << 30  # bytes above that of the harness: protects the machine from a case that fails
# files of a run or sweep that people read on a terminal or in a browser
PRINTED_FILES = {".log", ".html", ".csv", ".txt"}
TINY_RUN = (
    "model.hidden_size=32 model.num_hidden_layers=1 model.num_attention_heads=2 model.num_key_value_heads=1 model.head_dim=16 model.intermediate_size=32 "
    "train.max_steps=2 train.batch_size=2 train.eval_every=0 train.save_every=0 train.sample_every=0 data.max_length=32 data.val_path=null data.val_fraction=0.01 device=cpu "
    "data.path=rows.jsonl"
)
TRAIN = f"train {TINY_RUN} hydra.run.dir=out"


@dataclass(frozen=True)
class HostileCase:
    """`build` writes the harmful files into a Folder; then each of `commands` runs in it and must end with `code` and
    print `message`.
    """

    name: str
    category: str
    build: Callable[[Folder], object]
    commands: tuple[str, ...]  # shell lines: "train resume=run"; "chat", "rows", "evaluate", "report", "tokenizer"
    message: str  # a part of what each command prints, upper and lower case are equal
    code: int = 2
    is_light: bool = False  # whether it ends before torch is imported: part of the fast tests


@dataclass
class Folder:
    """The folder of a case.

    The current directory of its commands is `work`; nothing may change in `outside`.
    """

    root: Path
    base: Path  # unharmed files to start from

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def marker(self) -> Path:
        """A file that code of the case creates if it runs."""
        return self.outside / "executed"

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    def copy(self, name: str, target: str = "") -> Path:
        """Return a copy in `work` of an unharmed file or folder.

        They are new_run and sweep (killed before the first step), run and model (trained; not in light cases),
        tokenizer, rows.jsonl, chats.jsonl.
        """
        source, copied = self.base / name, self.work / (target or name)
        return Path(shutil.copytree(source, copied) if source.is_dir() else shutil.copy(source, copied))


@dataclass
class CommandEnd:
    """How a command of a case ended."""

    code: int | None = None  # None: killed at the deadline
    output: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    bytes: int = 0  # peak memory of the process and its children
    executed: list[str] = field(default_factory=list)
    wrote: list[str] = field(default_factory=list)
    control: list[str] = field(default_factory=list)  # places with raw control characters

    def failures(self, case: HostileCase) -> list[str]:
        """What is wrong with the end of the command, compared with the case."""
        found = [f"executed: {each}" for each in dict.fromkeys(self.executed)] + [
            f"changed outside: {each}" for each in dict.fromkeys(self.wrote)
        ]
        found += [f"raw control characters in {each}" for each in self.control]
        if self.code != case.code:
            found.append(f"exit code {self.code} instead of {case.code}")
        if case.message.lower() not in self.output.lower():
            found.append(f"no {case.message!r} in its output")
        if "Traceback (most recent call last)" in self.output:
            found.append("a traceback")
        if max(self.cpu_seconds, self.seconds - DEADLINE) > MAX_SECONDS:
            found.append(f"{self.seconds:.1f} seconds, {self.cpu_seconds:.1f} of them of processor time")
        if self.bytes > MAX_BYTES:
            found.append(f"{self.bytes >> 20} MiB")
        return found


def run_case(case: HostileCase, parent: Path, base: Path) -> list[CommandEnd]:
    """Build the case in a new folder below `parent`, run its commands, remove the folder."""
    folder = Folder(parent / "case", base)
    for path in (folder.work, folder.outside, folder.root / "home", folder.root / "tmp"):
        path.mkdir(parents=True)
    (folder.outside / "victim").write_text("not yours")
    try:
        case.build(folder)
        before = _contents(folder.outside)
        ends = [run_command(command, folder) for command in case.commands]
        if (after := _contents(folder.outside)) != before:
            ends[-1].wrote.append(f"{sorted(before.items() ^ after.items())}")
        return ends
    finally:
        shutil.rmtree(folder.root)


def run_command(command: str, folder: Folder) -> CommandEnd:
    """Run one shell line of a case in a forked process."""
    events, log = folder.root / "events", folder.root / "output"
    for file in (events, log):
        file.write_bytes(b"")
    modified = {path: path.lstat().st_mtime_ns for path in _printed_files(folder.work)}
    sys.stdout.flush()
    started = time.monotonic()
    if not (child := os.fork()):
        _child_main(command, folder, log, events)
    ended = CommandEnd()
    status, usage = _wait(child)
    ended.seconds, ended.bytes = time.monotonic() - started, usage.ru_maxrss * 1024
    ended.cpu_seconds = usage.ru_utime + usage.ru_stime
    ended.code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    ended.output = log.read_bytes().decode("utf-8", "backslashreplace")
    for line in events.read_text(encoding="utf-8", errors="backslashreplace").splitlines():
        kind, _, text = line.partition(" ")
        (ended.executed if kind == "executed" else ended.wrote).append(text)
    ended.control = [where for where, text in _printed(ended, folder.work, modified) if strip_control(text) != text]
    return ended


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    deadline = time.monotonic() + DEADLINE
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            return os.wait4(child, 0)[1:]
        time.sleep(0.002)


def _printed_files(work: Path) -> Iterator[Path]:
    return (
        path for path in work.rglob("*") if path.suffix in PRINTED_FILES and path.is_file() and not path.is_symlink()
    )


def _printed(ended: CommandEnd, work: Path, modified: dict[Path, int]) -> Iterator[tuple[str, str]]:
    yield "the output", ended.output
    for path in _printed_files(work):
        if modified.get(path) != path.lstat().st_mtime_ns:
            yield path.name, path.read_text(encoding="utf-8", errors="backslashreplace")


def _child_main(command: str, folder: Folder, log: Path, events: Path) -> None:
    """Run the command in this forked process, which ends here."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder.work)
        for descriptor, file, flags in (
            (0, "/dev/null", os.O_RDONLY),
            (1, str(log), os.O_WRONLY | os.O_APPEND),
            (2, str(log), os.O_WRONLY | os.O_APPEND),
        ):
            os.dup2(os.open(file, flags), descriptor)
        os.environ |= {"HOME": str(folder.root / "home"), "TMPDIR": str(folder.root / "tmp")}
        tempfile.tempdir = None  # read TMPDIR again
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE,) * 2)
        report = os.open(events, os.O_WRONLY | os.O_APPEND)
        audit = Audit(folder.root, lambda kind, text: (os.write(report, f"{kind} {text!r}\n".encode()), None)[1])
        paths.REPO_ROOT = folder.work
        audit.install()
        code = _call(shlex.split(command))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(arguments: list[str]) -> int:
    """Execute a command as its script does; return its exit code."""
    command, *argv = arguments
    sys.argv = [f"runner/{command}.py", *argv]
    sys.path[0] = str(ROOT)
    try:
        runpy.run_path(str(ROOT / "runner" / f"{command}.py"), run_name="__main__")
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


def _contents(folder: Path) -> dict[str, bytes | str]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else ""
        for path in folder.rglob("*")
    }
