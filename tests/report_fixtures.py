"""Run directories as a training leaves them, for the pages of several runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m"
EVALUATION = {"on": "validation", "rows": 80, "tokens": 100, "data": "e1", "tokenizer": "t1", "loss": {}}
FINGERPRINTS = {"data": "d1", "tokenizer": "t1", "model": "m1"}


def train_record(step: int, loss: float | None = None, **fields: Any) -> dict[str, Any]:
    loss = 2 + 3 * math.exp(-step / 20) if loss is None else loss
    numbers = {"lr": 1e-3, "tokens_per_second": 1000.0, "time": step / 10, "attempt": 1}
    return {
        "kind": "train",
        "step": step,
        "loss_tokens": 90 * step,
        "tokens": 100 * step,
        "loss": loss,
        **numbers,
        **fields,
    }


def eval_record(step: int, loss: float, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "loss_tokens": 90 * step,
        "tokens": 100 * step,
        "loss": loss,
        "time": step / 10,
        "attempt": 1,
        **fields,
    }


def make_run(
    folder: Path, records: list[dict[str, Any]] | None = None, settings: dict[str, Any] | None = None, **fields: Any
) -> Path:
    """Write a completed run. `settings`: of its section optimizer; `fields`: of run.json."""
    records = (
        [*(train_record(step) for step in range(10, 60, 10)), eval_record(50, 2.5)] if records is None else records
    )
    config = {
        "optimizer": {"name": "adamw", "lr": 0.001, **(settings or {})},
        "run": {"name": str(fields.get("name", ""))},
    }
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    (folder / ".hydra" / "overrides.yaml").write_text("[]")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    losses = [record["loss"] for record in records if record["kind"] == "eval"]
    values = {
        "status": "completed", "outcome": "completed", "attempt": 1, "step": 50, "stage": "pretrain", "model": "tiny", "init_from": "scratch",
        "metrics": {"loss": 2.1, "best_val_loss": min(losses, default=None)}, "evaluation": EVALUATION, "fingerprints": FINGERPRINTS,
        "started": "2026-11-21T10:00:00+00:00", "data": [{"file": "/data/rows.jsonl"}],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**values, **fields}))
    return folder


def make_sweep(folder: Path, jobs: dict[str, dict[str, Any]]) -> Path:
    """Write a sweep whose jobs have the given fields of run.json."""
    for name, fields in jobs.items():
        make_run(folder / name, **fields)
    recorded = [{"name": name, "overrides": dict([name.split("=")]), "status": "completed"} for name in jobs]
    (folder / "sweep.json").write_text(
        json.dumps(
            {"status": "completed", "created": "2026-11-21T09:00:00+00:00", "swept": {"seed": []}, "jobs": recorded}
        )
    )
    return folder


def page_data(page: str) -> dict[str, Any]:
    """Return the numbers that the scripts of a page read."""
    return json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
