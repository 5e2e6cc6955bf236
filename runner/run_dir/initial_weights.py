"""Where a run's first weights come from: resume > init_from=DIR > the newest finished run of the stage before > random."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean_path
from common.paths import outputs_dir
from models.config import ModelConfig
from runner.engine.config import Config
from runner.run_dir.naming import find_runs


def compatibility_fingerprints(config: Config) -> dict[str, str]:
    """What two runs must share for one to start from the other's weights: the model's shape and the tokenizer."""
    from data.tokenize.tokenizer import Tokenizer

    return {"model": model_fingerprint(config.model), "tokenizer": Tokenizer.load(Path(config.data.tokenizer)).fingerprint}


def model_fingerprint(model: ModelConfig) -> str:
    shape = {
        word: value for word, value in dataclasses.asdict(model).items() if word not in ("name", "attention", "dropout", "router_aux_loss_coef", "rope_scaling")
    }
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()


def resolve_init_from(config: Config, folder: Path, shared: dict[str, str]) -> str:
    """`config.init_from` as a path or "scratch"; `auto` looks under outputs/ and beside `folder`."""
    if config.init_from == "auto":
        return _newest_finished_run(config, folder, shared)
    check_init_from(config)
    return config.init_from


def check_init_from(config: Config) -> None:
    """Refuse an `init_from` that names nothing."""
    if config.init_from not in ("auto", "scratch") and not Path(config.init_from).exists():
        raise UserError("there is nothing to take weights from", f"init_from={config.init_from}", did_you_mean_path(config.init_from))


def _newest_finished_run(config: Config, folder: Path, shared: dict[str, str]) -> str:
    before = config.stage.init_from_stage
    if before is None:
        return "scratch"
    runs = [*find_runs(outputs_dir()), *(record.parent for record in folder.parent.glob("*/run.json"))]  # one placed by hand has its kin beside it
    found = [(record["ended"], run) for run in runs if _is_compatible(record := _read_metadata(run), before, shared) and (run / "model").is_dir()]
    if not found:
        print(f"warning: no finished {before} run with this model and tokenizer was found; {config.stage.name} starts from random weights", file=sys.stderr)
        return "scratch"
    newest = str(max(found, key=lambda pair: pair[0])[1])
    print(f"init_from=auto: weights of the newest {before} run, {newest}", file=sys.stderr)
    return newest


def _is_compatible(record: dict[str, Any], stage: str, shared: dict[str, str]) -> bool:
    return record.get("status") == "completed" and record.get("stage") == stage and shared.items() <= record.get("fingerprints", {}).items()


def _read_metadata(run: Path) -> dict[str, Any]:
    try:
        record = json.loads((run / "run.json").read_text())
    except (OSError, ValueError):
        return {}  # a run that is just writing it, or a damaged one: no candidate
    return record if isinstance(record, dict) else {}
