"""Where a benchmark's result goes: onto the terminal, and with --write into a dated file of results/."""

from __future__ import annotations

import datetime
import os
from pathlib import Path


def tell(name: str, title: str, command: str, found: str, write: bool) -> None:
    """`found` is a table; `command`, what anybody types to have it made again."""
    print(found)
    if write:
        where = Path(__file__).with_name("results") / f"{datetime.date.today()}-{name}.md"
        where.parent.mkdir(exist_ok=True)
        where.write_text(f"# {title}\n\n`{command}`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.\n\n{found}\n")
