"""Arguments and results of a benchmark: printed, and with --write stored in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib import ROOT
from lib.environment import LIMITS, recorded_variables

INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
    "i8mm",
)
RESULTS = ROOT / "benchmarks" / "results"


def result_parser(doc: str | None, *, needs_disk: str = "") -> argparse.ArgumentParser:
    """Return a parser with --write, and with --folder where the benchmark writes large files (`needs_disk` says which)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the result in benchmarks/results/")
    if needs_disk:
        parser.add_argument(
            "--folder", default=ROOT / "outputs", type=Path, help=f"where to write {needs_disk} (default: outputs/)"
        )
    return parser


def report_result(name: str, title: str, command: str, table: str, write: bool) -> None:
    """Print `table`; with `write`, store it as results/<name>.md below `command`, which measures it again."""
    print(table)
    if write:
        write_result(name, title, command, table)


def write_result(name: str, title: str, command: str, table: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = f"# {title}\n\n`{command}`. {machine_line()}.\n\n{table}\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")


def write_numbers(name: str, numbers: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(numbers, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def median_and_best(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f})"


def thread_setting() -> str:
    return f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"


def machine_facts() -> dict[str, Any]:
    """Return the processor, its cores and instruction sets for matrix products, and the variables that choose threads
    and kernels.
    """
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
        ):
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name", platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "variables": recorded_variables(os.environ),
    }


def machine_line() -> str:
    facts = machine_facts()
    variables = " ".join(f"{name}={value}" for name, value in facts["variables"].items())
    return f"{facts['cores']} cores, {facts['processor']}, {' '.join(facts['instruction_sets']) or 'instruction sets unknown'}, {variables or 'environment unset'}"


def machine_name(facts: dict[str, Any]) -> str:
    """Return a short name: processor, highest instruction set, cores, and the older processor that it emulates."""
    processor = re.sub(r"\((R|TM|r|tm)\)|\b(Processor|CPU)\b|@.*", " ", facts["processor"])
    sets = " ".join(facts.get("instruction_sets", ()))
    highest = next((name for name in ("amx", "avx512", "avx2", "sve", "asimd") if name in sets), "")
    limits = dict.fromkeys(
        f"as {facts['variables'][name].upper()}" for name in LIMITS if name in facts.get("variables", {})
    )
    return " ".join(f"{processor} {highest} {facts['cores']} cores {' '.join(limits)}".split())


def file_part(text: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-")
