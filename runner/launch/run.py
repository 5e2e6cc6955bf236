"""The one function that starts training, however the run was launched."""

from __future__ import annotations

import dataclasses
from functools import partial

from common.errors import Outcome, UserError
from common.filesystem import retry_disk
from data.tokenize.origin import RUN_TOKENIZER
from runner.engine.config import Config
from runner.launch import local_ranks, torchrun
from runner.launch.signals import StopFlag
from runner.launch.train_process import train_or_verify
from runner.run_dir.initial_weights import check_model, compatibility_fingerprints, resolve_init_from, restore_hub_weights, with_tokenizer
from runner.run_dir.lock import refusing_disk_errors
from runner.run_dir.metadata import RunMetadata


def run(config: Config, metadata: RunMetadata) -> float:
    """Train in the directory of `metadata`, from its newest checkpoint if it has one; return the loss that a sweep compares.

    Raises UserError (nothing was trained, run.json is as before), TrainingError, or Interrupted (resume= continues).
    """
    before = dict(metadata.fields)
    try:
        if before["init_from"] is None:
            config = dataclasses.replace(config, init_from=resolve_init_from(config, metadata.folder, compatibility_fingerprints(config)))
            check_model(config)
        elif config.init_from == "auto":  # resolved once, at the start of the run
            config = dataclasses.replace(config, init_from=before["init_from"])
        config = restore_hub_weights(config)
        with refusing_disk_errors(metadata.folder):
            copy = partial(with_tokenizer, config, metadata.folder, before["tokenizer_source"], is_new=before["init_from"] is None)
            config = retry_disk(copy)
        sources = {"init_from": config.init_from, "tokenizer_source": config.data.tokenizer}
        fingerprints = compatibility_fingerprints(config, metadata.folder / RUN_TOKENIZER)
        metadata.mark_running(stage=config.stage.name, model=config.model.name, fingerprints=fingerprints, **sources, **vars(config.run))
        if not torchrun.under_torchrun() and ((count := local_ranks.count_local_ranks(config)) > 1 or config.train.supervise):
            return local_ranks.train_on_ranks(config, metadata, count)
        with StopFlag(announces=True) as stop:
            torchrun.broadcast_config(config, metadata)
            return train_or_verify(config, metadata, stop)
    except UserError:
        metadata.revert(before)
        raise
    except BaseException as error:
        if metadata.fields["status"] == "running":
            is_stop = isinstance(error, KeyboardInterrupt)
            metadata.finish(Outcome.INTERRUPTED if is_stop else Outcome.FAILED, None if is_stop else f"{type(error).__name__}: {error}")
        raise
