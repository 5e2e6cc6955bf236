"""The settings in which the jobs of a sweep differ, read from the config that each job was started with."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from common.errors import UserError
from runner.engine.config import STEP_SIZE_KEYS
from runner.reporting.page_settings import flatten_settings
from runner.reporting.sweep_results.results import SweepResults
from runner.run_dir.saved_config import CONFIG_FILE, load_saved_config

MAX_KEYS, MAX_VALUE_CHARS = 200, 200  # of the settings that differ; of one value


def differing_settings(sweep: SweepResults) -> dict[str, list[str | None]]:
    """Return key -> value of each job, for the keys that do not have one value in all jobs with a config; None: the job has no such key."""
    configs = [_read_settings(sweep.folder / job.folder) if job.folder else {} for job in sweep.jobs]
    known = [index for index, config in enumerate(configs) if config]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({configs[index].get(key) for index in known}) > 1][:MAX_KEYS]
    return {key: [value if (value := config.get(key)) is None else value[:MAX_VALUE_CHARS] for config in configs] for key in differing}


def opens_by_tokens(sweep: SweepResults) -> bool:
    """Whether curves are first drawn by tokens: the size of a step is swept and the jobs do not have their steps in common, so that by step
    a job with large steps seems better than one that is ranked above it at the same number of tokens."""
    rules = {_read_settings(sweep.folder / job.folder).get("sweep.match_budget") for job in sweep.jobs if job.folder}
    return "steps" not in rules and bool(STEP_SIZE_KEYS & set(sweep.swept_keys))


def _read_settings(run_dir: Path) -> dict[str, str]:
    try:
        stat = (run_dir / CONFIG_FILE).stat()
    except OSError:
        return {}
    return _parse_settings(run_dir, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1024)
def _parse_settings(run_dir: Path, signature: tuple[int, int, int]) -> dict[str, str]:
    """Return the settings of a config.yaml; {} if it cannot be read. The page of a sweep is written often, a config once."""
    try:
        return {key: value for key, value in flatten_settings(load_saved_config(run_dir)) if not key.startswith("hydra.")}
    except (UserError, OSError, ValueError):
        return {}
