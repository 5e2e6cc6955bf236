"""A sweep under way: what Hydra's sweepers and launchers ask of it, whichever they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from common import errors, paths
from common.filesystem import make_dirs, write_atomic_file
from runner.config.overrides import hydra_quote
from runner.engine.config import Config
from runner.reporting import leaderboard
from runner.run_dir import config_snapshot, initial_weights, saved_config
from runner.run_dir.metadata import RunMetadata, has_started, read_run_metadata
from runner.sweep import budget, grid
from runner.sweep.grid import PointComposer
from runner.sweep.scheduler import LocalScheduler
from runner.sweep.state import SweepJob, SweepState

current_sessions: list[SweepSession] = []  # the sweep of this process, for Hydra's plugins


class SweepSession:
    """A sweep that is being run: what stands in its state, and the words of its jobs."""

    def __init__(self, state: SweepState, conf: Path = paths.CONF_DIR) -> None:
        self.state, self.conf = state, conf  # conf: the sweep's own copy, laid out; today's may be another before the next job begins
        self.shared: list[str] = state.fields["overrides"]
        self.composer = PointComposer(self.shared, conf)
        self._changed: dict[str, dict[str, str]] = {}  # by job, what fairness changes; composed once
        self._complained = False

    def config(self, job: SweepJob) -> Config:
        return self.composer.config(job["overrides"])

    def derived_overrides(self, job: SweepJob) -> dict[str, str]:
        """What `sweep.match_budget` and `sweep.lr_scale` make different in this job, and what init_from=auto has come to."""
        if job["name"] not in self._changed:
            config = self.config(job)
            fix = budget.resolve_budget_rule(config.sweep.match_budget, self.state.fields["swept"])
            self._changed[job["name"]] = budget.matching_overrides(config, self.state.fields["base_rows"], fix) | self._weights(config)
        return self._changed[job["name"]]

    def _weights(self, config: Config) -> dict[str, str]:
        """init_from=auto is asked once for all jobs that ask the same: a run that ends meanwhile would part the later ones from the earlier."""
        if config.init_from != "auto" or config.stage.after is None:
            return {}
        shared = initial_weights.compatibility_fingerprints(config)
        asked = " ".join([config.stage.after, *shared.values()])
        found = self.state.fields.setdefault("init_from", {})
        if asked not in found:
            found[asked] = initial_weights.resolve_init_from(config, self.state.folder, shared)
        return {"init_from": hydra_quote(found[asked])}

    def job_of(self, words: Sequence[str]) -> SweepJob:
        """The job that a sweeper means; one that it has only now thought of is new."""
        pairs = {key: value for key, _, value in (word.partition("=") for word in words)}
        return self.state.add({key: pairs[key] for key in self.state.fields["swept"] if key in pairs})

    def job_overrides(self, job: SweepJob) -> list[str]:
        """What one would type for this job alone."""
        mine = [word for word in self.shared if not word.startswith(("hydra.", "hydra/"))]
        return grid.merge_overrides(mine, [f"{key}={value}" for key, value in (job["overrides"] | self.derived_overrides(job)).items()])

    def child_words(self, job: SweepJob) -> list[str]:
        """What the job's own process is given: a run that has begun is continued from what it wrote down itself."""
        folder = self.state.folder / job["name"]
        if has_started(read_run_metadata(folder)):
            return [f"resume={folder}", *job.get("pending_overrides", [])]
        try:
            self._lay(job, folder)
        except (ValueError, OSError) as error:  # another trains there, or the disk is full: the job will say so itself, and its sweep goes on
            print(f"warning: {job['name']} cannot be prepared: {error.args[0] if errors.is_user_error(error) else error}", file=sys.stderr)
        return [f"resume={folder}"]

    def _lay(self, job: SweepJob, folder: Path) -> None:
        """A run that has not begun, composed from the files and words of the sweep, whatever conf/ says by now."""
        words, tree = self.job_overrides(job), self.composer.of_the_job(job["overrides"] | self.derived_overrides(job))
        config = saved_config.freeze_values(OmegaConf.to_container(tree, resolve=True), OmegaConf.to_container(tree))
        with RunMetadata.open(folder):
            make_dirs(folder / ".hydra")
            write_atomic_file(folder / saved_config.OVERRIDES_FILE, yaml.safe_dump(words).encode())
            config_snapshot.save_snapshot(folder, words, self.conf)
            write_atomic_file(folder / saved_config.CONFIG_FILE, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())

    def children(self) -> LocalScheduler:
        return LocalScheduler(self.state, self.child_words, self.report)

    def report(self) -> None:
        """Leaderboard and page as of now. No disk trouble there ends a sweep."""
        try:
            leaderboard.update_report(self.state.folder)
        except OSError as error:
            if not self._complained:
                self._complained = True
                print(f"warning: the report of the sweep cannot be written: {error}", file=sys.stderr)


def needs_run(job: SweepJob) -> bool:
    """Not completed, or to be continued with more words."""
    return not has_failed(job) and (bool(job.get("pending_overrides")) or job["status"] != "completed")


def has_failed(job: SweepJob) -> bool:
    """It diverged, and would again, whatever words it still waits for."""
    return job["status"] == "failed" and job["loss"] == "inf"
