"""Time that a step waits for its data: python benchmarks/data_wait.py [--only TEXT ...] [--no-training] [--write].

Each shipped configuration trains for two log intervals on the shipped sample (a preset: on the sample of its stage).
`data_wait` of metrics.jsonl is the share of the time since the record before. The first record contains the first
batch, which is made while nothing is computed; the log intervals of the shipped configurations are longer than those
used here. Also measured: the processor time of one thread for the data of a step; a step that takes longer does not
wait. --no-training measures only this, in seconds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from lib import ROOT
from lib.results import report_result, result_parser, thread_setting
from lib.runs import NO_EXTRAS, SAMPLES, run_train

GOAL = 0.01
STAGES = ("pretrain", "sft", "lora", "dpo", "dpo_lora")
STAGE_SAMPLES = {"lora": "lora_identity", "dpo_lora": "dpo"}  # those with another name than their stage
DATA_STEPS = 20  # steps whose data is made without training
INTERVAL_STEPS = {"tiny": 10}  # per log interval; 2 for larger models
OVERRIDES = ["init_from=scratch", "device=cpu", "train.compile=off", *NO_EXTRAS]


def configurations() -> Iterator[tuple[str, list[str], int]]:
    """Yield (name, overrides, steps per log interval)."""
    for model in sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml")):
        for stage in STAGES:
            yield f"stage={stage} model={model}", [f"stage={stage}", f"model={model}"], INTERVAL_STEPS.get(model, 2)
    for file in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        stage = file.stem.removeprefix("minimind_") if file.stem.startswith("minimind_") else "pretrain"
        path = SAMPLES / f"{STAGE_SAMPLES.get(stage, stage)}.jsonl"
        yield f"experiment={file.stem}", [f"experiment={file.stem}", f"data.path={path}"], 2


def training_cells(overrides: list[str], steps: int) -> str:
    """Train two log intervals; return their cells of the table."""
    with tempfile.TemporaryDirectory() as temp:
        run_train(
            *overrides,
            *OVERRIDES,
            f"train.max_steps={2 * steps}",
            f"train.log_every={steps}",
            f"hydra.run.dir={temp}/run",
        )
        first, second = (json.loads(line) for line in Path(temp, "run", "metrics.jsonl").read_text().splitlines())
    seconds = (second["time"] - first["time"]) / steps
    return f" {steps} | {seconds:.3f} | {first['data_wait']:.2%} | {second['data_wait']:.2%} |"


def data_seconds(overrides: list[str]) -> float:
    """Return the processor time for the data of a step (s)."""
    from data.tokenize.origin import open_tokenizer
    from runner.config.compose import compose_config
    from runner.engine.data_pipeline import build_data_pipeline, build_loader

    cfg = compose_config([*overrides, "data.num_workers=0"])
    tokenizer = open_tokenizer(cfg.data, "scratch")
    loader = build_loader(
        build_data_pipeline(cfg, tokenizer).train, cfg, tokenizer, cfg.train.batch_size * cfg.train.accumulation_steps
    )
    with closing(loader.iter_steps(0, 1 + DATA_STEPS)) as steps:
        next(steps)
        started = time.process_time()
        for _ in steps:
            pass
    return (time.process_time() - started) / DATA_STEPS


def table(only: list[str], trains: bool) -> str:
    lines = [
        f"fp32 on the CPU except where a preset sets another precision; {thread_setting()}. Goal: under {GOAL:.0%}.",
        "",
        "| configuration | data (ms per step) | steps per interval | step (s) | data_wait, first interval | second interval |",
        "|---|---|---|---|---|---|",
    ]
    chosen = [configuration for configuration in configurations() if all(text in configuration[0] for text in only)]
    if not chosen:
        raise SystemExit(f"no configuration contains {' and '.join(only)}")
    for name, overrides, steps in chosen:
        lines.append(
            f"| `{name}` | {data_seconds(overrides) * 1e3:.1f} |" + (training_cells(overrides, steps) if trains else "")
        )
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="configurations that contain all of these, e.g. stage=sft tiny"
    )
    parser.add_argument("--no-training", action="store_true", help="measure only the processor time for the data")
    args = parser.parse_args()
    flags = [
        *(["--only", *args.only] if args.only else []),
        *(["--no-training"] if args.no_training else []),
        "--write",
    ]
    command = " ".join(["python benchmarks/data_wait.py", *flags])
    report_result("data_wait", "Waiting for data", command, table(args.only, not args.no_training), args.write)
