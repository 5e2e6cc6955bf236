"""Statistics of a checkout as a Markdown table: `python scripts/code_stats.py [CHECKOUT] [--json] [--no-trace]`.

The trace runs two SFT steps of the tiny model twice on the CPU, in a temporary directory (about 15 s; the second run
reads the token cache of the first). It counts functions and methods of the checkout (no module or class bodies,
lambdas, comprehensions) entered until the first optimizer step returns: files: those that define them; lines: from
`def` (or decorator) to the last line, nested functions once; hops: how often the main thread goes from a function of
one file to a function of another, by call or return. Functions that Hydra or torch calls count; frames outside of the
checkout are skipped. The rest is read off the source.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("runner", "data", "models", "common", "hydra_plugins")
TOOLS = ("benchmarks", "scripts")
NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# values of assignments which may be repeated in every module
NOT_A_DEFINITION = {"TypeVar", "ParamSpec", "TypeVarTuple", "getLogger"}
ARGUMENTS = ["stage=sft", "init_from=scratch", "train.max_steps=2", "data.num_workers=0"]

# Runs in a process of its own as `python -c TRACER CHECKOUT RESULT ARGUMENTS...`. Writes every function of the checkout
# that is entered, in order.
TRACER = """
import json, os, runpy, sys, threading

root, result, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
prefixes = tuple(os.path.join(root, folder) + os.sep for folder in PRODUCT)
functions, before_build, hops = {}, None, 0
main_thread = threading.get_ident()
last_file = None


def is_function(frame):  # of the checkout; not a module, lambda or comprehension, nor a class body (no CO_OPTIMIZED)
    code = frame.f_code
    return code.co_flags & 1 and not code.co_name.startswith("<") and code.co_filename.startswith(prefixes)


def profile(frame, event, argument):
    global before_build, last_file, hops
    if not is_function(frame):
        return
    code = frame.f_code
    if event == "return" and code.co_name == "step" and code.co_qualname.startswith("Optimizer") and "/runner/engine/optim" in code.co_filename:
        write()
    if event in ("call", "return") and threading.get_ident() == main_thread:
        current = frame if event == "call" else frame.f_back
        while current and not is_function(current):
            current = current.f_back
        if current and current.f_code.co_filename != last_file:
            last_file = current.f_code.co_filename
            hops += 1
    if event != "call":
        return
    if code.co_name == "build_run" and before_build is None:
        before_build = len(functions)
    lines = [line for _, _, line in code.co_lines() if line]
    functions.setdefault((code.co_filename, code.co_firstlineno), (code.co_qualname, max(lines)))


def write():
    sys.setprofile(None)
    threading.setprofile(None)
    entered = [[file, name, first, last] for (file, first), (name, last) in functions.items()]
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"functions": entered, "before_build": before_build, "hops": hops}, file)
    os._exit(0)


sys.argv = [os.path.join(root, "runner", "train.py"), *arguments]
sys.path[0] = os.path.join(root, "runner")
threading.setprofile(profile)
sys.setprofile(profile)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


# --- source -----------------------------------------------------------------------------------------------------------


def python_files(root: Path, packages: tuple[str, ...] = PRODUCT) -> list[Path]:
    return sorted(
        file for package in packages for file in (root / package).rglob("*.py") if "__pycache__" not in file.parts
    )


def module_name(root: Path, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parse(file)))


@cache
def imported_names(root: Path, file: Path) -> list[str]:
    """Dotted names that a file imports anywhere: at the top, in functions, under TYPE_CHECKING, or relative. `from a
    import b` gives `a.b`.
    """
    own = module_name(root, file)
    package = own if file.stem == "__init__" else own.rpartition(".")[0]
    names: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(
                [
                    *(parents[: len(parents) - node.level + 1] if node.level else []),
                    *([node.module] if node.module else []),
                ]
            )
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def imported_modules(root: Path, file: Path, modules: set[str]) -> Iterator[str]:
    """Modules of `modules` that a file imports anywhere."""
    tool = module_name(root, file).partition(".")[0]
    folders = ("", f"{tool}.") if tool in TOOLS else ("",)  # a script imports its neighbours by bare name
    for name in imported_names(root, file):
        candidates = (folder + part for folder in folders for part in (name, name.rpartition(".")[0]))
        if module := next((candidate for candidate in candidates if candidate in modules), None):
            yield module


def import_graph(root: Path, packages: tuple[str, ...] = PRODUCT + TOOLS) -> dict[str, set[str]]:
    files = {module_name(root, file): file for file in python_files(root, packages)}
    return {name: set(imported_modules(root, file, set(files))) - {name} for name, file in files.items()}


def import_cycles(root: Path, packages: tuple[str, ...] = PRODUCT + TOOLS) -> list[list[str]]:
    """Strongly connected components of two or more modules, sorted.

    A parent package is not counted as imported by its modules.
    """
    graph = import_graph(root, packages)

    @cache
    def reachable(start: str) -> frozenset[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for target in graph[stack.pop()] - seen:
                seen.add(target)
                stack.append(target)
        return frozenset(seen)

    components = {
        tuple(sorted({name, *(other for other in reachable(name) if name in reachable(other))}))
        for name in graph
        if name in reachable(name)
    }
    return sorted(list(component) for component in components)


def top_level_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, line) of functions, classes and constants, also those inside a top-level `if`, `try` or `with`."""
    statements: list[ast.stmt] = list(tree.body)
    while statements:
        node = statements.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            function = node.value.func if isinstance(node.value, ast.Call) else None
            if function is not None and ast.unparse(function).rpartition(".")[2] in NOT_A_DEFINITION:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (name.id, node.lineno)
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            )
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            statements += direct_statements(node)


def direct_statements(node: ast.If | ast.Try | ast.With) -> list[ast.stmt]:
    blocks: list[ast.stmt] = [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]
    return blocks + [statement for handler in getattr(node, "handlers", []) for statement in handler.body]


def duplicate_names(root: Path, public_only: bool = True) -> dict[str, list[str]]:
    """{name: ["file:line", ...]} of top-level names which two or more modules define.

    `main` of a command (runner/*.py) and dunder names do not count.
    """
    definitions: dict[str, dict[str, int]] = defaultdict(dict)
    for file in python_files(root, PRODUCT):
        path = file.relative_to(root).as_posix()
        for name, line in top_level_names(parse(file)):
            is_command_main = name == "main" and file.parent in (root / "runner", root / "scripts")
            if not (name.startswith("__") or is_command_main or (public_only and name.startswith("_"))):
                definitions[name].setdefault(path, line)
    return {
        name: [f"{path}:{line}" for path, line in files.items()]
        for name, files in sorted(definitions.items())
        if len(files) > 1
    }


def count_tokens(file: Path) -> int:
    """Python tokens of a file.

    Comments, line ends, indentation and docstrings do not count, so that longer lines gain nothing. An f-string is one
    token, also to Python 3.12, which divides it.
    """
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in nodes(file)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, clean=False) is not None
    }
    count = open_strings = 0
    with file.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            count += not open_strings and token.type not in NO_CODE and token.start not in docstrings
            kind = tokenize.tok_name[token.type]
            open_strings += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return count


def eager_modules(root: Path) -> int:
    """Modules of this checkout that `runner/train.py --help` imports."""
    program = f"""
import atexit, runpy, sys

path = sys.argv[0] = sys.argv[1]
sys.path[0] = path.rpartition("/")[0]
sys.argv[1:] = ["--help"]
atexit.register(lambda: print(sum(name.partition(".")[0] in {PRODUCT!r} for name in sys.modules), file=sys.stderr))
runpy.run_path(path, run_name="__main__")
"""
    command = [sys.executable, "-c", program, str(root / "runner" / "train.py")]
    return int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stderr.split()[-1])


def retired_terms(root: Path) -> dict[str, int]:
    """Occurrences of each retired term (tests/language/retired.txt of this checkout) in code and docs."""
    command = [sys.executable, str(ROOT / "tests" / "test_language.py"), "--root", str(root), "--count", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


# --- trace ------------------------------------------------------------------------------------------------------------


def traced_step(root: Path) -> dict[str, Any]:
    """Files, functions, lines and hops of the first SFT step, started from the command line, with the rows tokenized
    before.
    """
    with tempfile.TemporaryDirectory(prefix="code_stats_") as temp:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        arguments = [*ARGUMENTS, f"data.cache={temp}/cache"]
        result = Path(temp) / "trace.json"
        program = f"PRODUCT = {PRODUCT!r}\n{TRACER}"
        commands = [
            [sys.executable, str(root / "runner" / "train.py"), *arguments, f"hydra.run.dir={temp}/first"],
            [sys.executable, "-c", program, str(root), str(result), *arguments, f"hydra.run.dir={temp}/second"],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=temp, env=environment, capture_output=True, text=True)
        if not result.is_file():
            raise RuntimeError(
                f"no optimizer step was traced (exit code {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        trace = json.loads(result.read_text(encoding="utf-8"))
    functions = trace["functions"]
    before = functions[: trace["before_build"] or 0]
    lines = {(file, line) for file, _, first, last in functions for line in range(first, last + 1)}
    return {
        "files": len({file for file, *_ in functions}),
        "functions": len(functions),
        "lines": len(lines),
        "hops": trace["hops"],
        "files_before_build_run": len({file for file, *_ in before}),
        "functions_before_build_run": len(before),
    }


# --- table ------------------------------------------------------------------------------------------------------------


def collect(root: Path, with_trace: bool = True) -> dict[str, Any]:
    sizes = {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8").splitlines() for file in python_files(root)
    }
    largest = max(sizes, key=lambda path: len(sizes[path]))
    return {
        "first_step": traced_step(root) if with_trace else None,
        "import_cycles": import_cycles(root),
        "duplicate_public_names": duplicate_names(root),
        "duplicate_names_with_private": len(duplicate_names(root, public_only=False)),
        "retired_terms": retired_terms(root),
        "eager_modules": eager_modules(root) if with_trace else None,
        "python_files": len(sizes),
        "tokens": sum(map(count_tokens, python_files(root))),
        "lines_per_file": {
            "median": statistics.median(map(len, sizes.values())),
            "max": len(sizes[largest]),
            "largest": largest,
        },
        "lines": sum(map(len, sizes.values())),
        "lines_without_blank": sum(bool(line.strip()) for lines in sizes.values() for line in lines),
    }


def as_markdown(stats: dict[str, Any]) -> str:
    cycles, duplicates, terms = (stats[key] for key in ("import_cycles", "duplicate_public_names", "retired_terms"))
    rows: list[tuple[str, str]] = []
    if step := stats["first_step"]:
        rows += [
            ("first SFT step: files / functions", f"{step['files']} / {step['functions']}"),
            ("first SFT step: lines of these functions", f"{step['lines']:,}"),
            ("first SFT step: hops between files", f"{step['hops']:,}"),
            (
                "before build_run: files / functions",
                f"{step['files_before_build_run']} / {step['functions_before_build_run']}",
            ),
            ("modules that train.py --help imports", f"{stats['eager_modules']}"),
        ]
    rows += [
        ("import cycles (modules)", f"{len(cycles)} ({sum(map(len, cycles))})"),
        ("public top-level names in two or more modules", f"{len(duplicates)}"),
        ("top-level names in two or more modules, with private ones", f"{stats['duplicate_names_with_private']}"),
        ("retired terms in code and docs", f"{sum(terms.values()):,}"),
        ("Python files (without tests)", f"{stats['python_files']}"),
        ("Python tokens", f"{stats['tokens']:,}"),
        ("lines per file, median / largest", "{median:g} / {max} ({largest})".format(**stats["lines_per_file"])),
        ("lines / without blank lines", f"{stats['lines']:,} / {stats['lines_without_blank']:,}"),
    ]
    text = "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)
    sections = {
        "Import cycles": [", ".join(cycle) for cycle in cycles],
        "Public names in two or more modules": [f"`{name}`: {', '.join(where)}" for name, where in duplicates.items()],
        "Retired terms": [f"{count:,} `{term}`" for term, count in terms.items()],
    }
    return text + "".join(
        f"\n{title}:\n" + "".join(f"- {item}\n" for item in items) for title, items in sections.items() if items
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Statistics of a checkout: size, import cycles, duplicate names, retired terms, one traced SFT step."
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument("--no-trace", action="store_true", help="do not run the two SFT steps")
    args = parser.parse_args()
    stats = collect(args.checkout.resolve(), with_trace=not args.no_trace)
    print(json.dumps(stats, indent=2) if args.json else as_markdown(stats), end="")


if __name__ == "__main__":
    main()
