"""Write sweep directories as a sweep and its jobs leave them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def record(
    step: int, loss: float | None, kind: str = "train", time: float | None = None, attempt: int = 1
) -> dict[str, Any]:
    """A record of metrics.jsonl: ten steps per second, 100 tokens with a label and 160 computed tokens per step."""
    fields = {
        "kind": kind,
        "step": step,
        "loss_tokens": step * 100,
        "tokens": step * 160,
        "loss": loss,
        "tokens_per_second": 1000.0,
    }
    fields |= {"time": step / 10 if time is None else time, "attempt": attempt}
    return fields | ({} if loss is not None else {"nonfinite": ["loss"]})


def training(best: float, steps: int = 40, eval_every: int = 10) -> list[dict[str, Any]]:
    """Records of a run whose loss falls from 8 and whose last validation loss is `best`."""
    records = []
    for step in range(1, steps + 1):
        loss = best + (8 - best) * math.exp(-6 * step / steps)
        records.append(record(step, loss + 0.1 * math.sin(7 * step)))
        if step % eval_every == 0:
            records.append(record(step, best if step == steps else loss, kind="eval"))
    return records


def job(
    swept: dict[str, str], records: list[dict[str, Any]] | None = None, status: str = "completed", **fields: Any
) -> dict[str, Any]:
    """A job of sweep.json with the records of its metrics.jsonl; None: there is no run directory."""
    return {"overrides": swept, "records": records, "status": status, **fields}


def write_sweep(
    folder: Path,
    jobs: list[dict[str, Any]],
    overrides: tuple[str, ...] = (),
    status: str = "completed",
    sweeper: str = "grid",
) -> Path:
    swept: dict[str, list[str]] = {}
    entries = []
    for each in jobs:
        for key, value in each["overrides"].items():
            swept.setdefault(key, []).append(value)
        name = each.get("name") or ",".join(f"{key}={value}" for key, value in sorted(each["overrides"].items()))
        entry = {"name": name, "attempt": 1, "error": None, "started": None, "ended": None, "loss": None, **each}
        records = entry.pop("records")
        entries.append(entry)
        if records is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
            metadata = {
                "status": each["status"],
                "attempt": 1,
                "step": records[-1]["step"] if records else 0,
                "metrics": {},
            } | entry.pop("run", {})
            (folder / name / "run.json").write_text(json.dumps(metadata))
    folder.mkdir(parents=True, exist_ok=True)
    swept = {key: list(dict.fromkeys(values)) for key, values in swept.items()}
    content = {
        "overrides": list(overrides),
        "swept": swept,
        "status": status,
        "created": "2026-11-21T10:00:00+00:00",
        "sweeper": sweeper,
        "launcher": "local",
    }
    (folder / "sweep.json").write_text(json.dumps(content | {"jobs": entries}))
    return folder
