"""Speed of two ranks relative to one: python benchmarks/ranks.py [--write].

The train command on the CPU (gloo), one thread per rank, eight micro-batches per step. Compared is tokens_per_second of
metrics.jsonl without the first steps; the cases are interleaved.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from lib.results import report_result, result_parser
from lib.runs import NO_EXTRAS, run_train

ROUNDS, STEPS, WARMUP_STEPS = 3, 7, 2
OVERRIDES = [
    "stage=pretrain",
    "init_from=scratch",
    "device=cpu",
    f"train.max_steps={STEPS}",
    "train.log_every=1",
    *NO_EXTRAS,
]
OVERRIDES += ["train.batch_size=4", "train.accumulation_steps=8", "train.compile=off"]
CASES = {  # name -> overrides
    "one rank": [],
    "two ranks, ddp": ["distributed=ddp", "distributed.nproc=2"],
    "two ranks, fsdp": ["distributed=fsdp", "distributed.nproc=2"],
}


def tokens_per_second(run_dir: Path, overrides: list[str]) -> float:
    run_train(*OVERRIDES, *overrides, f"hydra.run.dir={run_dir}", threads=1)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["tokens_per_second"] for record in records[WARMUP_STEPS:])


def table() -> str:
    speeds: dict[str, list[float]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as temp:
        for number in range(ROUNDS):  # interleaved: other load affects all cases
            for index, (name, overrides) in enumerate(CASES.items()):
                speeds[name].append(tokens_per_second(Path(temp, f"{number}.{index}"), overrides))
    lines = [
        f"The default model on the shipped sample, one thread per rank, micro-batches of 4 sequences; medians of {ROUNDS} rounds of "
        f"{STEPS - WARMUP_STEPS} steps. Goal: two ranks at least 1.7 times one with 8 micro-batches per step.",
        "",
        "| case | tokens/s, median (best) | relative to one rank |",
        "|---|---|---|",
    ]
    for name, values in speeds.items():
        ratio = statistics.median(value / one for value, one in zip(values, speeds["one rank"], strict=True))
        lines.append(f"| {name} | {statistics.median(values):,.0f} ({max(values):,.0f}) | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    args = result_parser(__doc__).parse_args()
    report_result("ranks", "Ranks", "python benchmarks/ranks.py --write", table(), args.write)
