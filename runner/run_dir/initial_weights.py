"""Initial weights of a run: init_from=DIR, or for init_from=auto the newest completed run of the previous stage, or random weights."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError, did_you_mean_path
from common.paths import outputs_dir
from runner.engine.config import Config
from runner.run_dir.metadata import RUN_FILE, RunMetadata
from runner.run_dir.naming import find_runs

IRRELEVANT_TO_WEIGHTS = ("name", "attention", "dropout", "router_aux_loss_coef", "rope_scaling")  # settings that change no shape


def compatibility_fingerprints(config: Config) -> dict[str, str]:
    """Return what two runs must share for one to start from the weights of the other: hashes of the model's shape and of the tokenizer."""
    from data.tokenize.tokenizer import Tokenizer

    shape = {key: value for key, value in dataclasses.asdict(config.model).items() if key not in IRRELEVANT_TO_WEIGHTS}
    model = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return {"model": model, "tokenizer": Tokenizer.load(Path(config.data.tokenizer)).fingerprint}


def resolve_init_from(config: Config, folder: Path, fingerprints: dict[str, str]) -> str:
    """Return `config.init_from` as a path or "scratch"; `auto` searches outputs/ and the directories beside `folder`."""
    if config.init_from == "auto":
        return _newest_completed_run(config, folder, fingerprints)
    check_init_from(config)
    return config.init_from


def check_init_from(config: Config) -> None:
    """Raise UserError if init_from is a path that does not exist."""
    if config.init_from not in ("auto", "scratch") and not Path(config.init_from).exists():
        raise UserError(
            f"init_from must be auto, scratch or an existing path, got {config.init_from}", f"init_from={config.init_from}", did_you_mean_path(config.init_from)
        )


def _newest_completed_run(config: Config, folder: Path, fingerprints: dict[str, str]) -> str:
    stage = config.stage.init_from_stage
    if stage is None:
        return "scratch"
    candidates = [*find_runs(outputs_dir()), *(file.parent for file in folder.parent.glob(f"*/{RUN_FILE}"))]
    found = [(fields["ended"], run) for run in candidates if _is_compatible(fields := RunMetadata.read(run), stage, fingerprints) and (run / "model").is_dir()]
    if not found:
        print(f"warning: no completed {stage} run with this model and tokenizer was found; {config.stage.name} starts from random weights", file=sys.stderr)
        return "scratch"
    newest = str(max(found, key=lambda item: item[0])[1])
    print(f"init_from=auto: weights of the newest {stage} run, {newest}", file=sys.stderr)
    return newest


def _is_compatible(fields: Mapping[str, Any], stage: str, fingerprints: dict[str, str]) -> bool:
    return fields.get("status") == "completed" and fields.get("stage") == stage and fingerprints.items() <= fields.get("fingerprints", {}).items()
