"""Mutation testing: apply known faults to a copy of the checkout, one at a time, and require that a test fails for
each.

    python scripts/mutation_test.py                        # every mutant in tests/mutations/*.toml
    python scripts/mutation_test.py optim lora_scale       # the mutants of a file, or single ones
    python scripts/mutation_test.py --list

A mutant is one replaced piece of source that gives a wrong result without an error. `caught`: a test fails. `survived`:
all of its tests pass, so a test is missing. `invalid`: no conclusion, because the mutant raises e.g. a NameError, or
its test fails on the unchanged source too.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MUTANTS_DIR = Path("tests") / "mutations"
# Set before torch is imported. Plugins of pytest that happen to be installed cost more than most tests
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
PRELOADED = (
    "torch",
    "numpy",
    "pytest",
    "hypothesis",
    "hydra",
    "omegaconf",
    "yaml",
    "safetensors.torch",
    "tokenizers",
    "pyarrow",
    "jinja2",
    "rich",
)
# of the copy
LEFT_OUT = shutil.ignore_patterns(".*", "outputs", "multirun", "build", "dist", "__pycache__", "*.egg-info")
# Exceptions of a mutant that is no silent fault
LOUD = {"NameError", "UnboundLocalError", "AttributeError", "ImportError", "ModuleNotFoundError", "SyntaxError"}
PROFILE = "mutation"  # of hypothesis
PYTEST_OPTIONS = (
    "-q",
    "--tb=line",
    "-p",
    "no:cacheprovider",
    "-p",
    "pytest_timeout",
    "-p",
    "_hypothesis_pytestplugin",
    f"--hypothesis-profile={PROFILE}",
)
NO_TESTS_COLLECTED = 5  # exit code of pytest
TIME_LIMIT = 120  # seconds for the tests of a mutant, which may loop forever; and for each test of the unchanged source
LOG_LINES = 20  # of pytest, if it neither passes nor fails


def _pattern(text: str) -> re.Pattern:
    """Match `text` wherever the formatter breaks its lines and whether or not it ends a list with a comma."""
    parts = [rf",?\s*{re.escape(part)}" if part in ")]}" else re.escape(part) for part in re.findall(r"\w+|\S", text)]
    return re.compile(r"\s*".join(parts))


@dataclass(frozen=True)
class Mutant:
    """One entry of tests/mutations/<subject>.toml."""

    subject: str
    name: str
    file: str  # below the root of the checkout
    old: str  # occurs exactly once in the file, however its lines are broken
    new: str
    tests: list[str]  # arguments of pytest; slow tests are run where the others pass
    imports: list[str]  # further packages that its tests import: imported once, before the fork

    def mutated(self, root: Path) -> str:
        """Return the file's text with the fault. Raises ValueError if `old` does not occur exactly once."""
        path = root / self.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        exact = re.compile(re.escape(self.old))
        found = list(exact.finditer(source)) or list(_pattern(self.old).finditer(source))
        if len(found) != 1:
            count = f"is {len(found)} times" if path.is_file() else "cannot be: there is no file"
            raise ValueError(
                f"{self.subject}.toml: {self.name}: its text {count} in {self.file}; "
                f"write the mutant for the source as it is now:\n{self.old}"
            )
        return source[: found[0].start()] + self.new + source[found[0].end() :]

    @contextmanager
    def applied(self, root: Path, version: int) -> Generator[None]:
        """Write the fault into `root`, and restore the file afterwards.

        Each version has a modification time of its own: cached bytecode is valid for one.
        """
        path = root / self.file
        original, modified = path.read_bytes(), int(path.stat().st_mtime)
        path.write_text(self.mutated(root), encoding="utf-8")
        os.utime(path, (modified + version, modified + version))
        try:
            yield
        finally:
            path.write_bytes(original)
            os.utime(path, (modified, modified))

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.old.splitlines(), self.new.splitlines(), self.file, f"{self.file} ({self.name})", lineterm="", n=0
        )
        return "\n".join(lines)


@dataclass
class MutantResult:
    mutant: Mutant
    status: str  # caught, survived or invalid
    detail: str  # the test that fails, or why the mutant is invalid
    seconds: float


def read_mutants(root: Path = ROOT) -> list[Mutant]:
    """Return all mutants of a checkout. Raises ValueError if one is incomplete, or a name exists twice."""
    mutants: list[Mutant] = []
    for path in sorted((root / MUTANTS_DIR).glob("*.toml")):
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        # of the whole file
        defaults = {key: entries.pop(key) for key in ("file", "tests", "imports") if key in entries}
        for name, entry in entries.items():
            try:
                mutants.append(Mutant(path.stem, name, **{"imports": [], **defaults, **entry}))
            except TypeError as error:
                raise ValueError(f"{path.name}: {name}: {error}") from error
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names of several mutants: {', '.join(twice)}")
    return mutants


def select_mutants(names: list[str], mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants with these names or subjects; all without names.

    Raises ValueError for an unknown name.
    """
    known = {mutant.name for mutant in mutants} | {mutant.subject for mutant in mutants}
    if unknown := [name for name in names if name not in known]:
        close = difflib.get_close_matches(unknown[0], known)
        raise ValueError(
            f"no mutant or subject is named {unknown[0]}"
            + (f"; did you mean {', '.join(close)}?" if close else "; --list shows all")
        )
    return [mutant for mutant in mutants if not names or {mutant.name, mutant.subject} & set(names)]


@contextmanager
def copied_checkout(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(root, copy, ignore=LEFT_OUT)
        yield copy


class PytestProcess:
    """pytest in a fork of this process, which has imported torch already, on the sources of another folder."""

    def __init__(self, root: Path, imports: Iterable[str]) -> None:
        self.root, self.report, self.log = root, root.parent / "report.json", root.parent / "pytest.log"
        os.environ.update(TEST_ENVIRONMENT, PYTHONPATH=str(root))
        for name in (*PRELOADED, *imports):
            importlib.import_module(name)
        gc.freeze()  # pytest collects garbage at its end: not that of all these modules

    def run(self, tests: list[str], stop_at_first: bool, time_limit: float = TIME_LIMIT) -> dict[str, Any]:
        """Return {"code": exit code of pytest, "failed": {test: class of its exception}}; code -1 after `time_limit`
        seconds.
        """
        self.report.unlink(missing_ok=True)
        if not (pid := os.fork()):
            self._child(tests, stop_at_first)
        deadline = time.monotonic() + time_limit
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"code": -1, "failed": {}}
            time.sleep(0.01)
        return json.loads(self.report.read_text()) if self.report.exists() else {"code": -2, "failed": {}}

    def last_lines(self) -> str:
        """Return the end of what pytest has printed."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])

    def _child(self, tests: list[str], stop_at_first: bool) -> None:
        try:
            os.setsid()
            os.chdir(self.root)
            sys.path[:] = [
                str(self.root),
                *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "scripts")),
            ]
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            recorder = FailureRecorder()
            register_hypothesis_profile()
            options = [*PYTEST_OPTIONS, f"--basetemp={self.root.parent / 'tmp'}", *(["-x"] if stop_at_first else [])]
            pytest = importlib.import_module("pytest")
            code = int(pytest.main([*tests, "-m", "not slow", *options], plugins=[recorder]))
            if code in (0, NO_TESTS_COLLECTED):
                slow = int(pytest.main([*tests, "-m", "slow", *options], plugins=[recorder]))
                code = code if slow == NO_TESTS_COLLECTED else slow
            self.report.write_text(json.dumps({"code": code, "failed": recorder.failed}))
        finally:
            os._exit(0)  # no cleanup of the parent's objects


def register_hypothesis_profile() -> None:
    """The same examples each time, and none made smaller after a failure."""
    from hypothesis import Phase, settings

    settings.register_profile(
        PROFILE, derandomize=True, database=None, deadline=None, phases=(Phase.explicit, Phase.generate)
    )


class FailureRecorder:
    """pytest plugin: class of the exception of each test that fails."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        self.failed.setdefault(node.nodeid, call.excinfo.typename)


def run_mutant(mutant: Mutant, version: int, process: PytestProcess) -> MutantResult:
    started = time.perf_counter()
    with mutant.applied(process.root, version):
        report = process.run(mutant.tests, stop_at_first=True)
    test, error = next(iter(report["failed"].items()), ("", ""))
    status, detail = "invalid", f"{test} raises {error}: the fault is not silent"
    if report["code"] == 0:
        status, detail = "survived", " ".join(mutant.tests)
    elif report["code"] != 1:
        detail = f"pytest ends with {report['code']}: {test} {error}\n{process.last_lines()}"
    elif error not in LOUD:
        status, detail = "caught", test
    return MutantResult(mutant, status, detail, time.perf_counter() - started)


def run_mutants(mutants: list[Mutant], root: Path = ROOT) -> list[MutantResult]:
    """Test each mutant, print a line for each, and run the tests that caught one on the unchanged source."""
    results = []
    with copied_checkout(root) as copy:
        process = PytestProcess(copy, sorted({name for mutant in mutants for name in mutant.imports}))
        for version, mutant in enumerate(mutants, start=1):
            results.append(run_mutant(mutant, version, process))
            print_result(results[-1])
        catching = sorted({result.detail for result in results if result.status == "caught"})
        unchanged: dict[str, Any] = (
            process.run(catching, stop_at_first=False, time_limit=TIME_LIMIT * len(catching))
            if catching
            else {"code": 0, "failed": {}}
        )
    if unchanged["code"] not in (0, 1):
        raise RuntimeError(f"pytest ends with {unchanged['code']} on the unchanged source")
    for result in results:
        if result.status == "caught" and result.detail in unchanged["failed"]:
            result.status, result.detail = "invalid", f"{result.detail} fails without the mutant too"
            print_result(result)
    return results


def print_result(result: MutantResult) -> None:
    mutant = result.mutant
    print(f"{result.status:<9} {mutant.subject}/{mutant.name:<44} {result.seconds:5.1f} s  {result.detail}", flush=True)
    if result.status == "survived":
        print(mutant.diff(), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a mutant, or a file of tests/mutations/ without its suffix (default: all)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        help="checkout with the source, the tests and the mutants (default: this one)",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="test each N-th of the chosen mutants (default: 1, all)",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and test none")
    options = parser.parse_args(arguments)
    try:
        mutants = select_mutants(options.names, read_mutants(options.root))[:: options.every]
        for mutant in mutants:
            mutant.mutated(options.root)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.subject}/{mutant.name:<44} {mutant.file}")
        return 0
    results = run_mutants(mutants, options.root)
    caught = sum(result.status == "caught" for result in results)
    print(f"{caught} of {len(results)} mutants caught in {sum(result.seconds for result in results):.0f} s")
    return 0 if caught == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
