"""Arguments and results of a benchmark: printed, and with --write stored in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lib import ROOT

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve", "i8mm")
THREAD_VARIABLES = ("OMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_")
RESULTS = ROOT / "benchmarks" / "results"


def result_parser(doc: str | None, *, needs_disk: str = "") -> argparse.ArgumentParser:
    """Return a parser with --write, and with --folder where the benchmark writes large files (`needs_disk` says which)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the result in benchmarks/results/")
    if needs_disk:
        parser.add_argument("--folder", default=ROOT / "outputs", type=Path, help=f"where to write {needs_disk} (default: outputs/)")
    return parser


def report_result(name: str, title: str, command: str, table: str, write: bool) -> None:
    """Print `table`; with `write`, store it as results/<name>.md below `command`, which measures it again."""
    print(table)
    if write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(f"# {title}\n\n`{command}`. {machine_line()}.\n\n{table}\n", encoding="utf-8")


def write_numbers(name: str, numbers: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(numbers, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def median_and_best(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f})"


def thread_setting() -> str:
    return f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}"


def machine_line() -> str:
    """Return cores, processor, its instruction sets for matrix products, and the variables that choose threads and kernels."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    sets = [name for name in INSTRUCTION_SETS if name in flags]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(THREAD_VARIABLES)]
    processor = fields.get("model name", platform.processor() or platform.machine())
    return f"{os.cpu_count()} cores, {processor}, {' '.join(sets) or 'instruction sets unknown'}, {' '.join(variables) or 'environment unset'}"
