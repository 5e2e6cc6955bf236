"""Regret and cost of search rules on recorded curves: python benchmarks/search.py [--write].

`python benchmarks/search.py --record NAME SWEEP` stores the curves of a completed sweep over points and seeds in
benchmarks/results/search-NAME.json. The replay asks the rule of `hydra/sweeper=halving` itself which job goes on.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lib.results import RESULTS, report_result, result_parser

ORDERS = 200  # of the points: random, for every rule
SETTINGS = ((2, 1 / 16), (2, 1 / 8), (2, 1 / 4), (3, 1 / 8), (4, 1 / 8))  # (eta, first rung) of halving
ASYNCHRONOUS = (2, 1 / 8)
WORKERS = 4  # of the asynchronous replay
Curve = list[tuple[float, float]]  # (share of the job's steps, validation loss) of each evaluation


class Task(NamedTuple):
    name: str
    settings: list[str]  # of all jobs, without paths
    points: list[dict[str, str]]
    curves: list[list[Curve]]  # of each point and seed

    @property
    def finals(self) -> list[float]:
        """The loss of the best weights of each point, mean over the seeds."""
        return [statistics.fmean(seed[-1][1] for seed in seeds) for seeds in self.curves]

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds of the best point."""
        best = min(range(len(self.points)), key=self.finals.__getitem__)
        return statistics.stdev(seed[-1][1] for seed in self.curves[best])


class SearchResult(NamedTuple):
    point: int
    cost: float  # full runs


Rule = Callable[[Sequence[Curve], Sequence[int]], SearchResult]  # curves of the points, order in which they are tried


def read_task(path: Path) -> Task:
    """Return the task with the lowest loss so far at each evaluation, that of the weights which a run keeps."""
    task = Task(**json.loads(path.read_text(encoding="utf-8")))
    for curve in itertools.chain.from_iterable(task.curves):
        shares, losses = zip(*curve, strict=True)
        curve[:] = zip(shares, itertools.accumulate(losses, min), strict=True)
    return task


def record(name: str, sweep: Path) -> None:
    """Store the curves of all points and seeds of a completed sweep."""
    from runner.reporting.read_sweep import read_sweep_results

    results = read_sweep_results(sweep.absolute())
    if results.status != "completed":
        raise SystemExit(f"{sweep} is {results.status}: record a completed sweep")
    points: dict[tuple[tuple[str, str], ...], dict[str, Curve]] = {}
    for job in results.jobs:
        point = tuple((key, value) for key, value in job.swept.items() if key != "seed")
        columns = job.metrics.eval.columns
        steps, losses = columns["step"], columns["loss"]
        curve = [(step / steps[-1], loss) for step, loss in zip(steps, losses, strict=True)]
        points.setdefault(point, {})[job.swept.get("seed", "")] = curve
    settings = [each for each in results.shared_overrides if "/" not in each]
    curves = [[seeds[seed] for seed in sorted(seeds)] for seeds in points.values()]
    task = Task(name, settings, [dict(point) for point in points], curves)
    (RESULTS / f"search-{name}.json").write_text(json.dumps(task._asdict()) + "\n", encoding="utf-8")


def loss_at(curve: Curve, share: float) -> float:
    """Return the loss of the first evaluation from this share of the steps on."""
    return next(loss for reached, loss in curve if reached >= share - 1e-9)


def full_grid(curves: Sequence[Curve], order: Sequence[int]) -> SearchResult:
    return SearchResult(min(order, key=lambda point: curves[point][-1][1]), len(curves))


def top_after_first_rung(count: int, first: float) -> Rule:
    """Train all points to the first rung and the best `count` of them to the end."""

    def search(curves: Sequence[Curve], order: Sequence[int]) -> SearchResult:
        kept = sorted(order, key=lambda point: loss_at(curves[point], first))[:count]
        best = min(kept, key=lambda point: curves[point][-1][1])
        return SearchResult(best, len(curves) * first + count * (1 - first))

    return search


def random_search(count: int) -> Rule:
    def search(curves: Sequence[Curve], order: Sequence[int]) -> SearchResult:
        return SearchResult(min(order[:count], key=lambda point: curves[point][-1][1]), count)

    return search


def halving(eta: int, first: float, workers: int = 1) -> Rule:
    """Replay the rule of hydra/sweeper=halving: `workers` jobs run at the same time, each as long as its steps."""
    from runner.sweep.halving import next_promotion
    from runner.sweep.rungs import rung_shares

    shares = [*rung_shares(first, eta), 1.0]

    def search(curves: Sequence[Curve], order: Sequence[int]) -> SearchResult:
        losses: list[list[float]] = [[] for _ in order]  # of each point in this order, at the rungs it has reached
        running: list[tuple[float, int]] = []  # (time at which it reaches its next rung, position in the order)
        cost = now = 0.0
        while True:
            while len(running) < workers:
                in_progress = {at for _, at in running}
                new = (at for at, reached in enumerate(losses) if not reached and at not in in_progress)
                position = next(new, None)
                if position is None:
                    position = next_promotion(losses, in_progress, eta, len(shares) - 1)
                if position is None:
                    break
                level = len(losses[position])
                length = shares[level] - (shares[level - 1] if level else 0.0)
                cost += length
                heapq.heappush(running, (now + length, position))
            if not running:
                break
            now, position = heapq.heappop(running)
            losses[position].append(loss_at(curves[order[position]], shares[len(losses[position])]))
        done = [position for position in range(len(order)) if len(losses[position]) == len(shares)]
        return SearchResult(order[min(done, key=lambda position: losses[position][-1])], cost)

    return search


def rules() -> dict[str, Rule]:
    named: dict[str, Rule] = {"all points to the end": full_grid}
    for eta, first in SETTINGS:
        named[f"halving, eta {eta}, first rung 1/{round(1 / first)}"] = halving(eta, first)
    eta, first = ASYNCHRONOUS
    named[f"the same, eta {eta}, 1/{round(1 / first)}, {WORKERS} workers"] = halving(eta, first, WORKERS)
    named["the best 2 after 1/8"] = top_after_first_rung(2, 1 / 8)
    named["the best 4 after 1/8"] = top_after_first_rung(4, 1 / 8)
    return named | {"random, 5 points": random_search(5)}


def replay(task: Task, search: Rule) -> tuple[float, float, float]:
    """Return (mean regret, largest regret, share of the grid's steps) over seeds and orders.

    Each replay sees one seed of every point. Regret: mean loss over the seeds of the chosen point, less the loss of
    the best point.
    """
    finals, random_order = task.finals, random.Random(0)
    regrets, costs = [], []
    for number in range(ORDERS):
        seed = number % min(map(len, task.curves))
        order = random_order.sample(range(len(task.points)), len(task.points))
        chosen = search([seeds[seed] for seeds in task.curves], order)
        regrets.append(finals[chosen.point] - min(finals))
        costs.append(chosen.cost / len(task.points))
    return statistics.fmean(regrets), max(regrets), statistics.fmean(costs)


def table(tasks: Sequence[Task]) -> str:
    head = ["rule", *(f"{task.name} ({len(task.points)} points)" for task in tasks)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines.append(f"| *spread of the seeds of the best point* | {' | '.join(f'{task.spread:.3f}' for task in tasks)} |")
    for name, search in rules().items():
        cells = ["{:.3f}, {:.3f} / {:.0%}".format(*replay(task, search)) for task in tasks]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    note = "Mean and largest regret (loss) / share of the steps of all points, over random orders of the points; each"
    return f"{note} replay sees one seed of every point.\n\n" + "\n".join(lines)


def main() -> None:
    parser = result_parser(__doc__)
    parser.add_argument("--record", nargs=2, metavar=("NAME", "SWEEP"), help="store the curves of a completed sweep")
    arguments: Any = parser.parse_args()
    if arguments.record:
        name, sweep = arguments.record
        return record(name, Path(sweep))
    tasks = [read_task(path) for path in sorted(RESULTS.glob("search-*.json"))]
    command = "python benchmarks/search.py --write"
    report_result("search", "Search rules on recorded curves", command, table(tasks), arguments.write)


if __name__ == "__main__":
    main()
