"""Sweep folders made by hand, as the launcher and its jobs leave them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def line(step: int, loss: float | None, kind: str = "train", time: float | None = None, attempt: int = 1) -> dict[str, Any]:
    """One of metrics.jsonl: ten steps a second, 100 tokens each."""
    fields = {"kind": kind, "step": step, "tokens": step * 100, "loss": loss, "tokens_per_second": 1000.0}
    fields |= {"time": step / 10 if time is None else time, "attempt": attempt}
    return fields | ({} if loss is not None else {"nonfinite": ["loss"]})


def falling(best: float, steps: int = 40, every: int = 10) -> list[dict[str, Any]]:
    """A training that comes down from 8 and ends at `best` in its validation loss."""
    lines = []
    for step in range(1, steps + 1):
        loss = best + (8 - best) * math.exp(-6 * step / steps)
        lines.append(line(step, loss + 0.1 * math.sin(7 * step)))
        if step % every == 0:
            lines.append(line(step, best if step == steps else loss, kind="eval"))
    return lines


def job(words: dict[str, str], lines: list[dict[str, Any]] | None = None, status: str = "completed", **stated: Any) -> dict[str, Any]:
    return {"overrides": words, "lines": lines, "status": status, **stated}


def made_sweep(folder: Path, jobs: list[dict[str, Any]], words: tuple[str, ...] = (), status: str = "completed") -> Path:
    swept: dict[str, list[str]] = {}
    stated = []
    for each in jobs:
        for word, value in each["overrides"].items():
            swept.setdefault(word, []).append(value)
        name = each.get("name") or ",".join(f"{word}={value}" for word, value in sorted(each["overrides"].items()))
        fields = {"name": name, "attempt": 1, "error": None, "started": None, "ended": None, "loss": None, **each}
        lines = fields.pop("lines")
        stated.append(fields)
        if lines is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "metrics.jsonl").write_text("".join(json.dumps(found) + "\n" for found in lines))
            (folder / name / "run.json").write_text(
                json.dumps({"status": each["status"], "attempt": 1, "step": lines[-1]["step"] if lines else 0, "metrics": {}})
            )
    folder.mkdir(parents=True, exist_ok=True)
    swept = {word: list(dict.fromkeys(values)) for word, values in swept.items()}
    content = {"overrides": list(words), "swept": swept, "status": status, "created": "2026-11-21T10:00:00+00:00", "sweeper": "basic", "launcher": "local"}
    (folder / "sweep.json").write_text(json.dumps(content | {"jobs": stated}))
    return folder
