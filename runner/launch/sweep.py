"""Sweeps: one run for every combination of words, started with --multirun and continued with resume=."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

from runner.launch import folders, ready
from runner.launch.compose import translated


def enter(typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Start a sweep: `typed` are its words, checked and with whole paths, `flags` those of Hydra that stood beside them."""
    jobs = _jobs(typed)
    for job in jobs:
        ready.folder_of(job)
    if not any(word.startswith("hydra.sweep.dir=") for word in typed):
        folders.claim(sweep=True)
    sys.argv[1:] = [*flags, *typed]
    app()


def resume(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Run what is not finished of the sweep in `folder`, and what the extra words add to it."""
    raise ValueError("this folder holds a sweep", str(folder), "continue its jobs one by one: resume=<a folder in it>")


def _jobs(typed: list[str]) -> list[list[str]]:
    """Every combination a basic sweep will run, so that job 7 cannot fail on a typo after six have trained."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with translated(typed):
        parsed = OverridesParser.create().parse_overrides(typed)
    folders.sweeping(override.get_key_element() for override in parsed if override.is_sweep_override())
    values = []
    for word, override in zip(typed, parsed, strict=True):
        if not override.is_sweep_override():
            values.append([word])
        elif override.is_choice_sweep() or override.is_range_sweep():  # glob(*) names files that are there
            values.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*values)]
