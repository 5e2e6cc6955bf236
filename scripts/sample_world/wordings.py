"""Reads wordings_<language>.txt: how a fact is told, asked, answered, and asked only in held-out files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass
class Wording:
    answer: str = ""
    told: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


def fill(template: str, a: str, b: str = "") -> str:
    """A sentence with its slots filled; English ones begin with a capital, Chinese has none."""
    sentence = template.format(a=a, b=b)
    return sentence[:1].upper() + sentence[1:]


def load(language: str) -> dict[str, Wording]:
    """One Wording per [section]; the marks are explained at the top of wordings_en.txt."""
    sections: dict[str, Wording] = {}
    for line in (FOLDER / f"wordings_{language}.txt").read_text(encoding="utf-8").splitlines():
        mark, text = line[:1], line[2:]
        if mark == "[":
            wording = sections[line.strip("[]")] = Wording()
        elif mark == "=":
            wording.answer = text
        elif mark in (".", "?", "!"):
            {".": wording.told, "?": wording.asked, "!": wording.held}[mark].append(text)
    return sections
