"""Best learning rate of a narrow and a wide decoder, with and without muP: python benchmarks/transfer.py [--write].

Each row is a sweep of `train.py --multirun` over factors of 2, with steps of 512 tokens; a loss is the mean of its
seeds. --data adds texts of your own; finished sweeps below --folder are not repeated.
"""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from lib.results import report_result, result_parser
from lib.runs import NO_EXTRAS, SAMPLES, run_train

NARROW, WIDE, HEAD_DIM = 64, 256, 32
DEPTHS = (2, 4)
# optimizer -> exponents of 2 of the learning rates of the base width, and of the wide model without muP
GRIDS = {"adamw": (range(-10, -3), range(-12, -7)), "muon": (range(-7, -2), range(-9, -4))}
OVERRIDES = ["init_from=scratch", "device=cpu", "data.max_length=128", "train.batch_size=4",
    "data.packing=best_fit", *NO_EXTRAS]  # fmt: skip


def model_overrides(width: int, depth: int) -> list[str]:
    heads = width // HEAD_DIM
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2)}
    sizes |= {"head_dim": HEAD_DIM, "intermediate_size": 3 * width, "num_hidden_layers": depth}
    return [f"model.{name}={value}" for name, value in sizes.items()]


def losses(folder: Path, exponents: range, overrides: list[str]) -> dict[int, float]:
    """Return the loss by exponent of the learning rate; infinite for a job that diverged."""
    if (
        not (folder / "leaderboard.csv").exists()
        or json.loads((folder / "sweep.json").read_text())["status"] == "running"
    ):
        rates = ",".join(str(2.0**exponent) for exponent in exponents)
        started = [f"resume={folder}"] if (folder / "sweep.json").exists() else [
            "--multirun", *OVERRIDES, *overrides, f"optimizer.lr={rates}", f"hydra.sweep.dir={folder}"]  # fmt: skip
        try:
            run_train(*started, threads=1)
        except RuntimeError as error:
            if "diverged" not in str(error):
                raise
    with (folder / "leaderboard.csv").open(encoding="utf-8") as file:
        rows = {
            round(math.log2(float(row["optimizer.lr"]))): row for row in csv.DictReader(file) if row["row"] == "point"
        }
    return {exponent: float(rows[exponent]["loss"] or "inf") for exponent in exponents}


def table(
    folder: Path, sources: dict[str, list[str]], optimizers: list[str], depths: list[int], steps: int, seeds: int
) -> str:
    length = [f"train.max_steps={steps}", f"seed={','.join(map(str, range(1, seeds + 1)))}"]
    lines = [
        f"Width {NARROW} and {WIDE}, {' '.join(length)}. A cell is the loss; bold: the lowest of the row. Moved: factors of 2 between the best learning rates of the wide and the narrow model.",
    ]
    for name, data in sources.items():
        for optimizer, (base_grid, plain_grid) in GRIDS.items():
            if optimizer not in optimizers:
                continue
            columns = sorted({*base_grid, *plain_grid})
            lines += ["", f"## {name}, {optimizer}", "", "| layers | width | " + " | ".join(f"{2.0**each:.4g}" for each in columns) + " | moved |", "|---" * (len(columns) + 3) + "|"]  # fmt: skip
            for depth in depths:
                best = None
                for label, width, base, grid in ((f"{NARROW}", NARROW, 0, base_grid), (f"{WIDE}", WIDE, 0, plain_grid), (f"{WIDE}, muP", WIDE, NARROW, base_grid)):  # fmt: skip
                    own = [f"optimizer={optimizer}", f"optimizer.mup_base_width={base}", *model_overrides(width, depth)]
                    found = losses(
                        folder / f"{name}_{optimizer}_{depth}_{width}_{base}_{steps}_{seeds}",
                        grid,
                        [*length, *data, *own],
                    )
                    lowest = min(found, key=lambda exponent: found[exponent])
                    best = lowest if best is None else best
                    cells = [f"{found[each]:.3f}" if each in found else "" for each in columns]
                    cells[columns.index(lowest)] = f"**{cells[columns.index(lowest)]}**"
                    moved = "" if width == NARROW else f"{lowest - best:+d}"
                    lines.append(f"| {depth} | {label} | {' | '.join(cells)} | {moved} |")
                    print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__, needs_disk="the sweeps")
    parser.add_argument("--data", nargs=2, action="append", default=[], metavar=("NAME", "PATH"), help="more texts")
    parser.add_argument("--optimizers", nargs="+", default=list(GRIDS), choices=GRIDS, help="default: all")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), help="layers, default: 2 4")
    parser.add_argument("--steps", type=int, default=96, help="of each job, default 96")
    parser.add_argument("--seeds", type=int, default=1, help="of each point, default 1")
    args = parser.parse_args()
    sources = {"shipped sample": [f"data.path={SAMPLES / 'pretrain.jsonl'}"]}
    sources |= {name: [f"data.path={Path(path).absolute()}", "data.val_fraction=0.05"] for name, path in args.data}
    text = table(Path(args.folder) / "transfer", sources, args.optimizers, args.depths, args.steps, args.seeds)
    depths = "" if args.depths == list(DEPTHS) else " ".join(map(str, args.depths))
    command = f"python benchmarks/transfer.py --optimizers {' '.join(args.optimizers)}{f' --depths {depths}' if depths else ''} --steps {args.steps} --seeds {args.seeds} --write"
    name = "transfer" if len(args.optimizers) > 1 else f"transfer-{args.optimizers[0]}"
    name += f"-{depths.replace(' ', '-')}-layers" if depths else ""
    report_result(name, "Transfer of the learning rate across width", command, text, args.write)
