"""README and docs: links and paths exist, the settings reference is up to date, and every setting has a description."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import settings_reference  # noqa: E402
from documented_commands import documented_commands  # noqa: E402

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]*)\)")


@pytest.mark.slow
def test_settings_reference_is_up_to_date() -> None:
    message = "run: python scripts/settings_reference.py"
    assert (ROOT / "docs" / "reference" / "settings.md").read_text(
        encoding="utf-8"
    ) == settings_reference.reference(), message


def test_size_of_the_docs_does_not_grow() -> None:
    counted = [page for page in PAGES if page.name not in ("CHANGELOG.md", "README.zh.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in counted) <= 38_000


@pytest.mark.slow
def test_settings_have_a_description_each() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| *([^|]*?) *\|$", settings_reference.reference(), re.MULTILINE)
    assert len(rows) > 90 and [name for name, text in rows if not text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_docs_lead_to_files(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    broken = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page: lower case, hyphens for spaces, no other
    punctuation; a number for a second one.
    """
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, count in found.items() for number in range(count + 1)}


def test_anchors_of_a_page_are_those_of_its_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `key=value`, set\n\n## Two\n```\n# no heading\n```\n## Two\n## [Linked](x.md) text\n", encoding="utf-8"
    )
    assert anchors(page) == {"a-keyvalue-set", "two", "two-1", "linked-text"}


def test_readme_in_chinese_has_the_commands_of_the_readme() -> None:
    english, chinese = (ROOT / "README.md", ROOT / "README.zh.md")
    assert [command.text for command in documented_commands(chinese)] == [
        command.text for command in documented_commands(english)
    ]
    links = [
        [target for target in LINK.findall(page.read_text(encoding="utf-8")) if not target.startswith("README")]
        for page in (english, chinese)
    ]
    assert sorted(links[0]) == sorted(links[1])
    assert "[中文](README.zh.md)" in english.read_text(
        encoding="utf-8"
    ) and "[English](README.md)" in chinese.read_text(encoding="utf-8")


def test_pictures_of_the_docs_are_small_and_shown() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if target.endswith((".png", ".svg"))
    }
    images = set((ROOT / "docs" / "images").iterdir())
    assert images <= shown and [path.name for path in images if path.stat().st_size > 200_000] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "contributing" and page.name != "extending.md"],
    ids=lambda page: page.name,
)
def test_source_files_named_in_docs_exist(page: Path) -> None:
    """Without the pages that name files which the reader adds."""
    paths = re.findall(
        r"`((?:runner|data|models|common|conf|benchmarks|scripts|tests|hydra_plugins)/[\w./-]+\.(?:py|yaml|md))`",
        page.read_text(encoding="utf-8"),
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


QUESTIONS = tomllib.loads((ROOT / "tests" / "docs_questions.toml").read_text(encoding="utf-8"))
MAX_PAGES = 9  # of docs/ with one search term


@pytest.mark.parametrize(("question", "answer"), [*QUESTIONS["user"].items(), *QUESTIONS["contributor"].items()])
def test_question_of_a_reader_is_answered_by_one_search(question: str, answer: list[str]) -> None:
    term, page = answer
    pages = [str(file.relative_to(ROOT)) for file in PAGES if term.lower() in file.read_text(encoding="utf-8").lower()]
    assert page in pages and len(pages) <= MAX_PAGES, pages
