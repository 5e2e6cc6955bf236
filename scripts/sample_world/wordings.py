"""Reads wordings_<language>.txt: the statements, questions and the answer of each relation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass
class Wording:
    answer: str = ""
    statements: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)  # questions of the validation files


def fill(template: str, a: str, b: str = "") -> str:
    """A sentence with its slots filled; English ones begin with a capital, Chinese has none."""
    sentence = template.format(a=a, b=b)
    return sentence[:1].upper() + sentence[1:]


def load_wordings(language: str) -> dict[str, Wording]:
    """One Wording per [section]; the marks are explained at the top of wordings_en.txt."""
    sections: dict[str, Wording] = {}
    for line in (FOLDER / f"wordings_{language}.txt").read_text(encoding="utf-8").splitlines():
        mark, text = line[:1], line[2:]
        if mark == "[":
            wording = sections[line.strip("[]")] = Wording()
        elif mark == "=":
            wording.answer = text
        elif mark in (".", "?", "!"):
            {".": wording.statements, "?": wording.questions, "!": wording.held_out}[mark].append(text)
    return sections
