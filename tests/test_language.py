"""Vocabulary check: refuse retired terms in names, comments, docstrings, messages, YAML and docs.

    python tests/test_language.py [PATH...] [--root CHECKOUT] [--count [--json]]

prints `file:line: term -> use instead` (exit code 1 if there is any). Terms, excluded files and allowed phrases:
tests/language/retired.txt. A single line is exempted by a comment on it, or on the line before it: `# language: allow
TERM[, TERM]` (Markdown: `<!-- language: allow TERM -->`).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import re
import subprocess
import symtable
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = ROOT / "tests" / "language" / "retired.txt"
sys.path.insert(0, str(ROOT / "scripts"))

import code_stats  # noqa: E402  (a script of this checkout)

SECTIONS = ("anywhere", "identifiers", "names", "allowed", "excluded")
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".css", ".jinja", ".html", ".sh"}
FILE_NAMES = {"Makefile", "run"}  # without a suffix: Makefile, .ci/run
WORD_BREAK = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")  # snake_case and CamelCase boundaries
ATTRIBUTE = re.compile(r"\bself\.(\w+)")
ESCAPE = re.compile(r"language: allow ([^>\n]+)")


@dataclass(frozen=True)
class Term:
    pattern: str
    replacement: str


@dataclass(frozen=True)
class Match:
    path: str
    line: int
    text: str
    term: Term

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text} -> {self.term.replacement}"


@dataclass
class TermSet:
    """Terms of one section as one regular expression, one group per term."""

    terms: list[Term] = field(default_factory=list)

    def compile(self, prefix: str, suffix: str) -> re.Pattern[str]:
        groups = "|".join(f"(?P<t{index}>{flexible(term.pattern)})" for index, term in enumerate(self.terms))
        return re.compile(f"{prefix}(?:{groups or '(?!)'}){suffix}", re.IGNORECASE)

    def of(self, match: re.Match[str]) -> Term:
        return self.terms[int((match.lastgroup or "t0")[1:])]


class Vocabulary:
    """Sections of retired.txt; patterns contain no capturing groups."""

    def __init__(self, path: Path = VOCABULARY) -> None:
        sections: dict[str, list[Term]] = {name: [] for name in SECTIONS}
        section = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("["):
                section = line.strip("[] ")
                continue
            pattern, tab, replacement = line.partition("\t")
            if section not in sections or not (tab or section == "excluded"):
                raise ValueError(f"{path}:{number}: expected `pattern<TAB>use instead` below one of {SECTIONS}")
            if re.search(r"(?<!\\)[A-Z]", pattern) and section != "excluded" and section != "allowed":
                raise ValueError(f"{path}:{number}: a pattern is written in lower case")
            sections[section].append(Term(pattern.strip(), replacement.strip()))
        self.sections = sections
        self.anywhere, self.identifiers, self.names = (TermSet(sections[name]) for name in SECTIONS[:3])
        self.anywhere_regex = self.anywhere.compile(r"\b", r"\b")
        # 6 times faster than the one above, which knows the term that matches; of lower-case text
        self.any_term = re.compile(
            rf"\b(?:{'|'.join(flexible(term.pattern) for term in self.anywhere.terms) or '(?!)'})\b"
        )
        self.identifiers_regex = self.identifiers.compile("", r"\Z")
        self.names_regex = self.names.compile("", r"\Z")
        self.allowed = [
            (glob.pattern, re.compile(flexible(glob.replacement), re.IGNORECASE)) for glob in sections["allowed"]
        ]

    def is_excluded(self, path: str) -> bool:
        return any(fnmatch(path, glob.pattern) for glob in self.sections["excluded"])

    @functools.cache  # noqa: B019  (keeps its two instances alive, which live as long as the process)
    def is_retired(self, name: str, is_name: bool) -> bool:
        name = spaced(name)
        return bool(self.identifiers_regex.match(name) or (is_name and self.names_regex.match(name)))

    def check_text(self, path: str, text: str) -> Iterator[Match]:
        """Matches of all sections in a file. `path`: relative to the checkout, with `/`."""
        prose = WORD_BREAK.sub(" ", text)  # keeps the line numbers
        allowed = [regex for glob, regex in self.allowed if fnmatch(path, glob)]
        hits: list[tuple[int, str, Term]] = []
        if self.any_term.search(prose.lower()):
            for regex in allowed:
                prose = regex.sub(lambda match: re.sub(r"[^\n]", "\0", match.group()), prose)
            starts = [0, *(match.end() for match in re.finditer("\n", prose))]
            for match in self.anywhere_regex.finditer(prose):
                name = " ".join(match.group().split())
                hits.append((bisect_right(starts, match.start()), name, self.anywhere.of(match)))
        if path.endswith(".py") and any(self.is_retired(*name) for name in may_bind(path, text)):
            for line, name, is_name in bound_names(path, text):
                if any(regex.fullmatch(spaced(name)) for regex in allowed):
                    continue
                for terms, regex in [(self.identifiers, self.identifiers_regex)] + [
                    (self.names, self.names_regex)
                ] * is_name:
                    if hit := regex.match(spaced(name)):
                        hits.append((line, name, terms.of(hit)))
                        break
        lines = text.split("\n")
        for line, matched, term in sorted(hits, key=lambda item: item[0]):
            if not is_escaped(lines, line, matched):
                yield Match(path, line, matched, term)


def flexible(pattern: str) -> str:
    """A space of a pattern matches a line break and the `#` of a comment that goes on, too."""
    return pattern.replace(" ", r"(?:[\s#]+)")


@functools.cache
def spaced(name: str) -> str:
    """`_letIn_2` as `let in 2`."""
    return WORD_BREAK.sub(" ", name).strip().lower()


def is_escaped(lines: list[str], line: int, matched: str) -> bool:
    """Whether a comment on this line or on the line before allows `matched`; a plural counts as its singular."""
    for text in lines[max(line - 2, 0) : line]:
        if escape := ESCAPE.search(text):
            if spaced(matched).rstrip("s") in [spaced(term.strip(" -.`")).rstrip("s") for term in escape[1].split(",")]:
                return True
    return False


def may_bind(path: str, text: str) -> set[tuple[str, bool]]:
    """At least the (name, is_name) of `bound_names`, in a sixth of its time."""
    names = {(part.removesuffix(".py"), True) for part in path.split("/")}
    names |= {(name, False) for name in ATTRIBUTE.findall(text)}
    tables = []
    with contextlib.suppress(SyntaxError):  # a file that is being edited
        tables = [symtable.symtable(text, path, "exec")]
    for table in tables:
        scope = table.get_name()
        is_name = scope in ("top", "lambda", "genexpr", "listcomp", "setcomp", "dictcomp")
        names |= {(scope, True), *((name.removeprefix(f"_{scope}__"), is_name) for name in table.get_identifiers())}
        tables += table.get_children()
    return names


def bound_names(path: str, text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, name, is_name) of every name that a module binds.

    `is_name`: module, package, class, function, method or module constant.
    """
    parts = [part for part in path.removesuffix(".py").split("/") if part != "__init__"]
    yield from ((1, part, True) for part in parts[-1:])
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a file that is being edited
        return
    constants = {
        id(node)
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, id(node) in constants
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.lineno, node.attr, False


def text_files(root: Path, paths: list[Path] | None = None) -> list[Path]:
    """Files of a checkout which are checked: tracked ones and new ones that git does not ignore; below `paths` where
    given.
    """
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    files = [root / name for name in sorted(set(listing.splitlines()))]
    chosen = [file for file in files if (file.suffix in SUFFIXES or file.name in FILE_NAMES) and file.is_file()]
    if paths:
        chosen = [file for file in chosen if any(file == path or path in file.parents for path in paths)]
    return chosen


def retired_terms(
    root: Path = ROOT, paths: list[Path] | None = None, vocabulary: Vocabulary | None = None
) -> list[Match]:
    """Every retired term in the code and docs of a checkout."""
    vocabulary = vocabulary or Vocabulary()
    matches: list[Match] = []
    for file in text_files(root, paths):
        name = file.relative_to(root).as_posix()
        if not vocabulary.is_excluded(name):
            matches += vocabulary.check_text(name, file.read_text(encoding="utf-8", errors="replace"))
    return matches


def main() -> int:
    parser = argparse.ArgumentParser(description="List retired terms (tests/language/retired.txt).")
    parser.add_argument(
        "paths", nargs="*", type=Path, metavar="PATH", help="files or folders (default: the whole checkout)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read (default: this one)")
    parser.add_argument("--count", action="store_true", help="print how often each term occurs")
    parser.add_argument("--json", action="store_true", help="with --count: print JSON")
    args = parser.parse_args()
    matches = retired_terms(args.root.resolve(), [path.resolve() for path in args.paths])
    if not args.count:
        print("\n".join(map(str, matches)), end="\n" if matches else "")
        print(f"{len(matches)} retired terms in {len({match.path for match in matches})} files", file=sys.stderr)
        return int(bool(matches))
    counts = Counter(match.term for match in matches)
    if args.json:
        print(json.dumps({term.pattern: count for term, count in counts.most_common()}))
    else:
        print("\n".join(f"{count:6,}  {term.pattern} -> {term.replacement}" for term, count in counts.most_common()))
    return 0


# --- tests ------------------------------------------------------------------------------------------------------------


def vocabulary_of(tmp_path: Path, text: str) -> Vocabulary:
    path = tmp_path / "retired.txt"
    path.write_text(text, encoding="utf-8")
    return Vocabulary(path)


def test_language_of_code_and_docs_has_no_retired_terms():
    assert [str(match) for match in retired_terms()] == []


def test_language_public_names_exist_once():
    assert code_stats.duplicate_names(ROOT) == {}


def test_language_terms_match_prose_and_parts_of_identifiers(tmp_path):
    vocabulary = vocabulary_of(tmp_path, "[anywhere]\nfoo\tbar\nlet go\trelease\n")
    text = "# a foo, then let\n# go\nclass OneFoo:\n    food = my_foo = 1\n"
    assert [(match.line, match.text) for match in vocabulary.check_text("a.py", text)] == [
        (1, "foo"),
        (1, "let # go"),
        (3, "Foo"),
        (4, "foo"),
    ]


def test_language_identifiers_and_names_match_whole_names_only(tmp_path):
    vocabulary = vocabulary_of(tmp_path, "[identifiers]\nfoo\tbar\n[names]\nbaz\tbar\n")
    text = "foo_bar = 1\ndef baz(foo, the_baz):\n    baz = foo\n    return baz\n"
    assert [str(match) for match in vocabulary.check_text("baz.py", text)] == [
        "baz.py:1: baz -> bar",
        "baz.py:2: baz -> bar",
        "baz.py:2: foo -> bar",
    ]


def test_language_terms_are_allowed_by_phrase_path_and_comment(tmp_path):
    vocabulary = vocabulary_of(
        tmp_path, "[anywhere]\nfoos?\tbar\n[allowed]\n*\tfoo fighters\ndocs/*\tfoo\n[excluded]\ngen/*\n"
    )
    assert list(vocabulary.check_text("a.md", "foo fighters\n<!-- language: allow foo -->\ntwo foos\n")) == []
    assert list(vocabulary.check_text("docs/a.md", "foo\n")) == [] and vocabulary.is_excluded("gen/a.py")
    assert [match.line for match in vocabulary.check_text("a.py", "foo = 1  # language: allow bar\n")] == [1]


def test_language_duplicate_names_and_cycles_are_detected(tmp_path):
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner" / "a.py").write_text(
        "from typing import TypeVar\nT = TypeVar('T')\ndef load(): ...\ndef _load(): ...\n", encoding="utf-8"
    )
    (tmp_path / "runner" / "b.py").write_text(
        "T = 1\nclass load: ...\ndef use():\n    from runner import c\n", encoding="utf-8"
    )
    (tmp_path / "runner" / "c.py").write_text("import runner.b\n_load = 1\n", encoding="utf-8")
    assert code_stats.duplicate_names(tmp_path) == {"load": ["runner/a.py:3", "runner/b.py:2"]}
    assert set(code_stats.duplicate_names(tmp_path, public_only=False)) == {"load", "_load"}
    assert code_stats.import_cycles(tmp_path) == [["runner.b", "runner.c"]]


if __name__ == "__main__":
    sys.exit(main())
