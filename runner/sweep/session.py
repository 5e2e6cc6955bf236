"""A sweep while this process drives it: the overrides of each job, its run directory, the report, the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from common import paths
from common.errors import FAILED, INTERRUPTED, TrainingError, UserError, print_note, resume_command
from common.filesystem import make_dirs
from runner.config import snapshot
from runner.config.literals import quote_path
from runner.config.overrides import is_hydra_override, to_overrides
from runner.engine.config import Config
from runner.launch import initial_weights
from runner.launch.branch import branch_job
from runner.reporting.live import RepeatedPage
from runner.run_dir import saved_config
from runner.run_dir.contents import has_checkpoints, has_started
from runner.run_dir.metadata import RunMetadata
from runner.sweep import budget
from runner.sweep.grid import PointComposer, merge_overrides
from runner.sweep.state import SweepJob, SweepState
from runner.tracking.lines import SweepLines


class SweepSession:
    """A sweep with its lock held.

    `conf` is the directory that job configs are composed from: the sweep's own copy of conf/.
    """

    def __init__(
        self,
        state: SweepState,
        conf: Path = paths.CONF_DIR,
        composer: PointComposer | None = None,
        config: DictConfig | None = None,
    ) -> None:
        """`config` is that which Hydra has composed for the sweep; its section `hydra` reaches the jobs."""
        self.state, self.conf = state, conf
        self.composer = composer or PointComposer(state.overrides)
        self.composer.conf = conf
        self._derived: dict[str, dict[str, str]] = {}  # by job name
        # jobs whose settings or data this launch has refused before their first step
        self.refused_jobs: list[SweepJob] = []
        self.page = RepeatedPage(self._write_report, lambda message: print_note(f"warning: {message}"))
        self.lines = SweepLines(config.tracker.console if config else "auto")
        self.hydra_config = config

    def run_dir(self, job: SweepJob) -> Path:
        return self.state.folder / job.name

    def derived_overrides(self, job: SweepJob) -> dict[str, str]:
        """Return what the rules of section `sweep` and init_from=auto set in this job, and an evaluation at the end of a
        job that has none.
        """
        if job.name not in self._derived:
            config = self.composer.config(job.overrides)
            derived = budget.derived_overrides(config, self.state.base_step, self.state.swept)
            self._derived[job.name] = derived | self._initial_weights(config)
        return self._derived[job.name]

    def _initial_weights(self, config: Config) -> dict[str, str]:
        """Resolve init_from=auto once for all jobs that ask the same: a run that completes meanwhile must not change
        the later jobs.
        """
        if config.init_from != "auto" or config.stage.init_from_stage is None:
            return {}
        fingerprints = initial_weights.compatibility_fingerprints(config)
        request = " ".join([config.stage.init_from_stage, *fingerprints.values()])
        if request not in self.state.init_from:
            self.state.init_from[request] = initial_weights.resolve_init_from(config, self.state.folder)
        return {"init_from": quote_path(self.state.init_from[request])}

    def job_overrides(self, job: SweepJob) -> list[str]:
        """Return the overrides that start this job as a run by itself."""
        shared = [override for override in self.state.overrides if not is_hydra_override(override)]
        return merge_overrides(shared, to_overrides(job.overrides | self.derived_overrides(job)))

    def prepare(self, job: SweepJob) -> list[str]:
        """Write the run directory of a job that has not begun; return the arguments of train.py that start or continue
        the job.

        Raises UserError if another process trains there, OSError if the disk refuses.
        """
        run_dir = self.run_dir(job)
        if has_started(RunMetadata.read(run_dir)) or has_checkpoints(run_dir):
            return [f"resume={run_dir}", *job.pending_overrides]
        overrides, tree = self.job_overrides(job), self.composer.tree(job.overrides, self.derived_overrides(job))
        config = saved_config.freeze_values(OmegaConf.to_container(tree, resolve=True), OmegaConf.to_container(tree))
        with suppress(OSError):  # a job uses a saved data.cache only if it exists; it says why it cannot
            make_dirs(Path(tree.data.cache))
        with RunMetadata.open(run_dir) as metadata:
            if tree.keep == "optimizer":
                branch_job(metadata, tree.init_from, overrides)
                return [f"resume={run_dir}"]
            make_dirs(run_dir / ".hydra")
            snapshot.write_yaml(run_dir / saved_config.OVERRIDES_FILE, overrides)
            snapshot.save_snapshot(run_dir, overrides, self.conf)
            snapshot.write_yaml(run_dir / saved_config.CONFIG_FILE, config)
            metadata.record_created()
        return [f"resume={run_dir}"]

    def _write_report(self) -> None:
        """Update the leaderboard and the page while jobs run."""
        from runner.reporting import leaderboard

        leaderboard.update_report(self.state.folder, is_final=self.state.status != "running")

    def finish(self, stopped: bool, problem: UserError | None = None) -> None:
        """Write the final status and print the summary. Exits with 75 or 1 unless all jobs are completed, or paused for
        good.

        Raises TrainingError for a `problem` of the search, UserError where a new sweep has done nothing, because every job was refused: its directory is removed.
        """
        state = self.state
        if state.is_new_dir and state.jobs and len(self.refused_jobs) == len(state.jobs):
            state.has_begun = False
            raise _error_of_all(self.refused_jobs)
        state.refresh_from_runs()
        statuses = {job.status for job in state.jobs} - {"paused"}
        status = "completed" if statuses <= {"completed"} else "failed" if "failed" in statuses else "interrupted"
        if stopped or problem:
            status = "failed" if problem else "interrupted"
        if status != state.status or state.is_stale:
            state.set_status(status)
            self.page.write()
        from runner.reporting.leaderboard import describe_sweep_end

        text, event = describe_sweep_end(state.folder)
        self.lines.show("sweep_end", event, text)
        if status == "completed":
            return
        if problem:
            raise TrainingError(f"{problem.message} ({problem.setting}); {problem.fix}")
        if any(job.needs_run or (stopped and job.status == "paused") for job in state.jobs):
            print_note(f"continue with: {resume_command(state.folder)}")
        sys.exit(INTERRUPTED if status == "interrupted" else FAILED)


def _error_of_all(jobs: Sequence[SweepJob]) -> UserError:
    """Return the error that the first of the refused `jobs` has printed; it stands for all of them."""
    printed = {label: text.strip() for label, _, text in (line.strip().partition(":") for line in jobs[0].last_lines)}
    message = printed.get("error") or jobs[0].error or "it was refused"
    number = f"all {len(jobs)} jobs were" if len(jobs) > 1 else "the only job was"
    return UserError(
        f"{number} refused: {message}",
        printed.get("where", jobs[0].name),
        printed.get("fix", "correct it and start the sweep again"),
    )
