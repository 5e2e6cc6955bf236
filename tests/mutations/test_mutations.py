"""Mutation testing: for every known fault in tests/mutations/*.toml some test fails.

The command: `python scripts/mutation_test.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutation_test import ROOT, read_mutants

SCRIPT = ROOT / "scripts" / "mutation_test.py"
MUTANTS = read_mutants()
MIN_MUTANTS = 60  # a smaller number is a mistake: entries are changed with the source, not removed
# CI tests a part of the mutants; MUTANTS_EVERY=1 tests all
EVERY = int(os.environ.get("MUTANTS_EVERY", "125"))
SUBJECTS = sorted({mutant.subject for mutant in MUTANTS})
WITH_IMPORTS = {mutant.subject for mutant in MUTANTS if mutant.imports}  # together: large packages are imported once
GROUPS = [sorted(WITH_IMPORTS), sorted({*SUBJECTS} - WITH_IMPORTS)]  # a process each


def mutation_test(*arguments: str) -> tuple[int, str]:
    """Return exit code and output of the command."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def is_test(test: str) -> bool:
    """`test`: FILE or FILE::FUNCTION."""
    file, _, function = test.partition("::")
    return (ROOT / file).is_file() and (not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("subject", SUBJECTS)
def test_mutant_texts_are_found_once_in_the_source(subject: str) -> None:
    """A mutant whose text is gone is written again, for the source as it is now."""
    for mutant in MUTANTS:
        if mutant.subject == subject:
            assert mutant.mutated(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8")


def test_mutants_are_enough_and_name_tests_that_exist() -> None:
    assert len(MUTANTS) >= MIN_MUTANTS
    assert [(mutant.name, test) for mutant in MUTANTS for test in mutant.tests or ["none"] if not is_test(test)] == []


@pytest.mark.slow(long=True)
@pytest.mark.parametrize("subjects", GROUPS, ids=range(len(GROUPS)))
def test_mutants_are_caught(subjects: list[str]) -> None:
    code, output = mutation_test(*subjects, f"--every={EVERY}")
    assert code == 0, output


CHECKOUT = {
    "source.py": "def half(x):\n    return x / 2\n\n\ndef third(x):\n    return x / 3\n",
    "tests/test_source.py": (
        "from source import half, third\n\n\ndef test_half():\n    assert half(4) == 2\n\n\ndef test_third():\n    assert third(9) in (3, 4.5)\n"
        "\n\ndef test_red():\n    assert half(4) == 1\n"
    ),
    "tests/mutations/source.toml": """
file = "source.py"
tests = ["tests/test_source.py::test_half", "tests/test_source.py::test_third"]
[wrong_half]
old = "x / 2"
new = "x / 4"
[wrong_third]
old = "x / 3"
new = "x / 2"
[loud]
old = "x / 2"
new = "y / 2"
[tested_by_a_red_test]
old = "x / 2"
new = "x / 8"
tests = ["tests/test_source.py::test_red"]
[no_such_test]
old = "x / 2"
new = "x / 4"
tests = ["tests/test_source.py::test_gone"]
""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with mutants of every status."""
    for name, content in CHECKOUT.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["slow"]\n')
    return tmp_path


@pytest.mark.slow
def test_mutation_test_tells_caught_survived_and_invalid_mutants_apart(checkout: Path) -> None:
    code, output = mutation_test("--root", str(checkout))
    # the last line of each counts
    status = {line.split()[1]: line.split()[0] for line in output.splitlines() if " source/" in line}
    assert status == {
        "source/wrong_half": "caught",
        "source/wrong_third": "survived",
        "source/loud": "invalid",
        "source/tested_by_a_red_test": "invalid",
        "source/no_such_test": "invalid",
    }, output
    assert code == 1 and "1 of 5 mutants caught" in output
    assert (checkout / "source.py").read_text() == CHECKOUT["source.py"]


def test_mutation_test_refuses_a_mutant_whose_text_is_gone(checkout: Path) -> None:
    (checkout / "source.py").write_text("def half(x):\n    return x * 0.5\n")
    code, output = mutation_test("--root", str(checkout), "wrong_half")
    assert code == 2 and "source.toml: wrong_half: its text is 0 times in source.py" in output and "x / 2" in output


def test_mutation_test_refuses_an_unknown_name() -> None:
    code, output = mutation_test("lora_scale")
    assert code == 2 and "did you mean lora_scale_is_alpha" in output
