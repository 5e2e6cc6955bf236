"""One run from its typed config: weights found, metadata kept, ranks started, engine called."""

from __future__ import annotations

import dataclasses

from common.errors import Outcome, is_user_error
from runner.engine.config import Config
from runner.launch import local_ranks, torchrun
from runner.launch.signals import StopFlag
from runner.launch.train_process import train_or_verify
from runner.run_dir import initial_weights
from runner.run_dir.metadata import RunMetadata


def run(config: Config, metadata: RunMetadata) -> float:
    """Train in the folder of `metadata`, from its newest checkpoint if it has one; returns the loss a sweep compares.

    Raises a refusal (nothing was trained, and run.json is as it was), RunFailed, or Interrupted (saved, resume= continues).
    """
    before = dict(metadata.fields)
    try:
        shared = initial_weights.compatibility_fingerprints(config)
        if before["init_from"] is None:
            config = dataclasses.replace(config, init_from=initial_weights.resolve_init_from(config, metadata.folder, shared))
        elif config.init_from == "auto":  # decided once in the life of a run
            config = dataclasses.replace(config, init_from=before["init_from"])
        metadata.mark_running(stage=config.stage.name, init_from=config.init_from, fingerprints=shared)
        if not torchrun.under_torchrun() and (count := local_ranks.count_local_ranks(config)) > 1:
            return local_ranks.train_on_ranks(config, metadata, count)
        with StopFlag() as stop:
            torchrun.broadcast_config(config, metadata)
            return train_or_verify(config, metadata, stop)
    except BaseException as error:
        if is_user_error(error):
            metadata.revert(before)
        elif metadata.fields["status"] == "running":
            metadata.finish(Outcome.FAILED, f"{type(error).__name__}: {error}")
        raise
