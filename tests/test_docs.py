"""README and docs: links and paths exist, the settings reference is up to date, and every setting has a description."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import settings_reference  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_settings_reference_is_up_to_date() -> None:
    message = "run: python scripts/settings_reference.py"
    assert (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8") == settings_reference.reference(), message


def test_settings_have_a_description_each() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| *([^|]*?) *\|$", settings_reference.reference(), re.MULTILINE)
    assert len(rows) > 90 and [name for name, text in rows if not text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_docs_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "contributing" and page.name != "extending.md"], ids=lambda page: page.name)
def test_source_files_named_in_docs_exist(page: Path) -> None:
    """Without the pages that name files which the reader adds."""
    paths = re.findall(
        r"`((?:runner|data|models|common|conf|benchmarks|scripts|tests|hydra_plugins)/[\w./-]+\.(?:py|yaml|md))`", page.read_text(encoding="utf-8")
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []
