"""One run from its typed config: weights found, record kept, ranks started, engine called."""

from __future__ import annotations

import dataclasses

from runner.engine.config import Config
from runner.engine.signals import StopFlag
from runner.launch import lineage, ranks, torchrun
from runner.launch.carry import carry
from runner.launch.record import Record
from runner.launch.refusal import is_refusal


def start(config: Config, record: Record) -> float:
    """Train in the folder of `record`, from its newest checkpoint if it has one; returns the loss a sweep compares.

    Raises a refusal (nothing was trained, and run.json is as it was), RunFailed, or Interrupted (saved, resume= continues).
    """
    before = dict(record.fields)
    try:
        shared = lineage.fingerprints(config)
        if before["init_from"] is None:
            config = dataclasses.replace(config, init_from=lineage.resolve(config, record.folder, shared))
        elif config.init_from == "auto":  # decided once in the life of a run
            config = dataclasses.replace(config, init_from=before["init_from"])
        record.running(stage=config.stage.name, init_from=config.init_from, fingerprints=shared)
        if not torchrun.started_us() and (count := ranks.count(config)) > 1:
            return ranks.train_on_ranks(config, record, count)
        with StopFlag() as stop:
            torchrun.call_the_others(config, record)
            return carry(config, record, stop)
    except BaseException as error:
        if is_refusal(error):
            record.undo(before)
        elif record.fields["status"] == "running":
            record.finish("failed", f"{type(error).__name__}: {error}")
        raise
