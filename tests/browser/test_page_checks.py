"""The checks of the pages find what they are there for: a test that cannot fail proves nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import page_checks
import pytest

BAD_PAGE = """<html><body style="background:#fff"><h1>a</h1><h3 style="color:#999">pale</h3><input><svg width=2000 height=9></svg><i id=x></i><i id=x></i>
<img src="http://example.com/a.png"><script>console.log("said"); alert("shown"); raise_error()</script></body></html>"""


@pytest.mark.slow
def test_checks_of_pages_find_every_fault(open_page: Any, page_faults: list[str], tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(BAD_PAGE)
    page = open_page(tmp_path / "report.html", 390)
    unnamed, low_contrast, overflow = (
        page_checks.unnamed(page),
        page_checks.low_contrast(page),
        page_checks.overflow(page),
    )
    assert {fault.split(":")[0].split(" ")[0] for fault in page_faults} == {"request", "console", "dialog", "error"}
    page_faults.clear()
    assert [fault.partition(":")[0] for fault in unnamed] == [
        "no name",
        "no label",
        "no text for",
        "no text for",
        "id twice",
        "no language",
        "no main",
        "h3 after h1",
    ]
    assert len(low_contrast) == 1 and "pale" in low_contrast[0] and overflow[0].startswith("the page is 2")
