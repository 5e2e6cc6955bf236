"""Table over machines of the results of speed.py: our compiled step relative to each other trainer, and its share of
the matrix peak.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lib.environment import OWN
from lib.results import machine_name

OURS = "ours, packed, compiled"
NOT_OTHERS = ("ours", "activation checkpointing")

Case = dict[str, Any]


def summary_table(results: Iterable[dict[str, Any]]) -> str:
    """Return the table of `results`, the numbers that speed.py has stored: machines from the worst to the best ratio,
    and so the workloads of each.
    """
    rows = [row for numbers in results for row in summary_rows(numbers)]
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["machine"]] = min(worst.get(row["machine"], float("inf")), worst_ratio(row))
    rows.sort(key=lambda row: (worst[row["machine"]], row["machine"], worst_ratio(row)))
    others = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    lines = [["machine", "workload", "share of peak", *others], ["---"] * (3 + len(others))]
    for row in rows:
        lines.append(
            [
                row["machine"],
                row["workload"],
                f"{row['share_of_peak']:.1%}",
                *(cell(row["ratios"].get(name)) for name in others),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary_rows(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for precision in dict.fromkeys(case["precision"] for case in numbers["cases"]):
        cases = [case for case in numbers["cases"] if case["precision"] == precision]
        if (ours := pair(cases, OURS)) is None:
            continue
        names = dict.fromkeys(case["case"] for case in cases if not case["case"].startswith(NOT_OTHERS))
        others = {name: found for name in names if (found := pair(cases, name))}
        has_best = numbers.get("environments", "own") != "own"
        rows.append({
            "machine": machine_name(numbers),
            "workload": f"{numbers['workload']}, {numbers['stage']}, {precision}",
            "share_of_peak": ours[0]["share_of_peak"],
            "ratios": {name: tuple(relative(ours[at], other[at]) for at in range(1 + has_best)) for name, other in others.items()},
        })  # fmt: skip
    return rows


def pair(cases: list[Case], name: str) -> tuple[Case, Case] | None:
    """Return the case in the environment of its users and in its best one, which may be the same; None if it was not
    measured.
    """
    found = {case.get("setting", OWN) == OWN: case for case in cases if case["case"] == name}
    return (found[True], found.get(False, found[True])) if True in found else None


def relative(ours: Case, other: Case) -> float:
    return ours["useful_against_first"] / other["useful_against_first"]


def worst_ratio(row: dict[str, Any]) -> float:
    return min((ratio for ratios in row["ratios"].values() for ratio in ratios), default=float("inf"))


def cell(ratios: tuple[float, ...] | None) -> str:
    if ratios is None:
        return ""
    return f"{ratios[0]:.2f}" + (f" (best: {ratios[1]:.2f})" if len(ratios) > 1 else "")
