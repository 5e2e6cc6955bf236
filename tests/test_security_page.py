"""SECURITY.md names the limits that the program has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "SECURITY.md"
ROW = re.compile(r"^\| .* \| ([\d,]+)( MiB)?[^|]* \| `([\w.]+)\.(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("number", "unit", "module", "name"), ROWS, ids=[row[-1] for row in ROWS])
def test_limit_of_the_page_is_that_of_the_program(number: str, unit: str, module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) == int(number.replace(",", "")) << (20 if unit else 0)


def test_every_row_of_the_table_of_limits_is_compared() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Limits")[2].partition("##")[0]
    assert table.count("\n| ") - 1 == len(ROWS) > 20
