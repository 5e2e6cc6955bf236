"""The shell commands of README and docs: indented and fenced blocks whose first line begins with a program."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROGRAMS = (
    "python", "pip", "make", "git", "torchrun", "curl", "lm_eval", "hf", "ollama", "llama-cli", "llama-server", "vllm", "head", "grep", "srun", "swanlab",
    "tensorboard", "wandb", "docker", "source", ".", "less", "tail", "cat",
)  # fmt: skip
PATH_OF_PYTHON = re.compile(r"(?:\.venv|fresh|other)/bin/|3\.\d+$")  # python3.11, .venv/bin/python, fresh/bin/pip
ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
FENCE = re.compile(r"^ *```(\w*)")
SHELL_FENCES = ("", "sh", "bash", "shell", "console")


@dataclass(frozen=True)
class Command:
    page: str  # path of the page in the repository
    line: int
    text: str  # without its comment, continued lines joined

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"

    @property
    def argv(self) -> list[str]:
        """Arguments without assignments to the environment."""
        argv = shlex.split(self.text)
        while argv and ASSIGNMENT.match(argv[0]):
            del argv[0]
        return argv

    @property
    def program(self) -> str:
        """`runner/train.py` of `python runner/train.py`, else the first part: `make`."""
        argv = self.argv
        is_script = is_program(argv[0], ("python",)) and len(argv) > 1 and argv[1].endswith(".py")
        return argv[1] if is_script else PATH_OF_PYTHON.sub("", argv[0])


def is_program(name: str, programs: tuple[str, ...] = PROGRAMS) -> bool:
    return PATH_OF_PYTHON.sub("", name) in programs


def documented_commands(page: Path) -> list[Command]:
    """Return the commands of a page in their order."""
    found = []
    for first, block in _blocks(page.read_text(encoding="utf-8").splitlines()):
        if _first_program(block[0]):
            found += [Command(str(page.relative_to(ROOT)), first + offset, text) for offset, text in _joined(block)]
    return found


def files_of_page(page: Path) -> dict[str, str]:
    """Return the files that a page shows: a fenced block that begins with `# my_optimizer.py`, or a block below a line
    that ends with `my_conf/x.yaml:`.
    """
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"^```python\n(# ([\w/.-]+\.py)\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"`(my_\w+/[\w/.-]+\.yaml)`:\n\n```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (my_\w+/[\w/.-]+\.yaml):\n\n((?: {8}.*\n|\n)+)", text, re.MULTILINE)
    return (
        {name: content for content, name in named}
        | dict(fenced)
        | {name: textwrap.dedent(content) for name, content in indented}
    )


def _first_program(line: str) -> bool:
    try:
        parts = shlex.split(line.removeprefix("$ ").rstrip("\\"), comments=True)
    except ValueError:  # an apostrophe: text
        return False
    while parts and ASSIGNMENT.match(parts[0]):
        del parts[0]
    return not parts and line.startswith("#") or bool(parts) and is_program(parts[0])


def _blocks(lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines without their indentation) of each indented block and each fenced block of
    a shell.
    """
    block: list[str] = []
    fence: str | None = None
    for number, line in enumerate([*lines, ""], 1):
        if match := FENCE.match(line):
            if fence in SHELL_FENCES and block:
                yield number - len(block), block
            block, fence = [], match[1] if fence is None else None
        elif fence is not None:
            block.append(line.strip())
        elif line.startswith("    ") and (block or not lines[number - 2].strip()):
            block.append(line[4:])
        elif block:
            yield number - len(block), block
            block = []


def _joined(block: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (offset of its first line, command without comment); lines that do not begin with a program are what a
    command prints.
    """
    text, start = "", 0
    for offset, line in enumerate(block):
        start = start if text else offset
        text += line
        if text.endswith("\\"):
            text = text[:-1].rstrip() + " "
            continue
        if _first_program(text) and not text.startswith("#"):
            yield start, _without_comment(text.removeprefix("$ "))
        text = ""


def _without_comment(text: str) -> str:
    return re.sub(r"\s+#\s.*$", "", text)
