"""Where a benchmark's result goes: onto the terminal, and with --write into a dated file of results/."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def tell(name: str, title: str, command: str, found: str, write: bool) -> None:
    """`found` is a table; `command`, what anybody types to have it made again."""
    print(found)
    if write:
        where = RESULTS / f"{datetime.date.today()}-{name}.md"
        where.parent.mkdir(exist_ok=True)
        where.write_text(f"# {title}\n\n`{command}`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.\n\n{found}\n")


def keep(name: str, facts: dict[str, Any]) -> None:
    """The numbers themselves, beside the table."""
    (RESULTS / f"{datetime.date.today()}-{name}.json").write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
