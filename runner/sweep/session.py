"""A sweep while this process drives it: the overrides of each job, its run directory, the report, the end. Launcher and
sweepers use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf, read_write

from common import paths
from common.errors import UserError, print_note, resume_command
from common.exit_codes import FAILED, INTERRUPTED
from common.filesystem import make_dirs, write_atomic_file
from runner.config import snapshot
from runner.config.literals import quote_path
from runner.config.overrides import is_hydra_override
from runner.config.unread import check_typed_are_read
from runner.engine.config import Config
from runner.launch import initial_weights, torchrun
from runner.reporting.live import RepeatedPage
from runner.run_dir import contents, saved_config
from runner.run_dir.contents import has_checkpoints, has_started
from runner.run_dir.metadata import RunMetadata
from runner.sweep import budget, validation
from runner.sweep.backends.base import LauncherOptions
from runner.sweep.grid import PointComposer, SweeperOptions, merge_overrides, split_swept
from runner.sweep.state import SweepJob, SweepState
from runner.tracking.console.sweep_lines import SweepLines

STATUSES = ("new", "interrupted", "failed", "completed")


class SweepSession:
    """A sweep with its lock held.

    `conf` is the directory that job configs are composed from: the sweep's own copy of conf/.
    """

    def __init__(self, state: SweepState, conf: Path = paths.CONF_DIR, composer: PointComposer | None = None) -> None:
        self.state, self.conf = state, conf
        self.composer = composer or PointComposer(state.overrides)
        self.composer.conf = conf
        self._derived: dict[str, dict[str, str]] = {}  # by job name
        # jobs whose settings or data this launch has refused before their first step
        self.refused_jobs: list[SweepJob] = []
        self.page = RepeatedPage(self._write_report, lambda message: print_note(f"warning: {message}"))
        self.lines = SweepLines("auto")
        self.hydra_config: DictConfig | None = None  # as composed for the sweep; its section `hydra` reaches the jobs

    def run_dir(self, job: SweepJob) -> Path:
        return self.state.folder / job.name

    def job_of(self, overrides: Sequence[str]) -> SweepJob:
        """Return the job of these overrides, a new one if the sampler has drawn a new point."""
        values = {key: value for key, _, value in (override.partition("=") for override in overrides)}
        return self.state.add_job({key: values[key] for key in self.state.swept if key in values})

    def derived_overrides(self, job: SweepJob) -> dict[str, str]:
        """Return what sweep.match_budget, sweep.lr_scale and init_from=auto set in this job, and an evaluation at the
        end of a job that has none.
        """
        if job.name not in self._derived:
            config = self.composer.config(job.overrides)
            rule = budget.resolve_budget_rule(config.sweep.match_budget, self.state.swept)
            matching = budget.matching_overrides(config, self.state.base_step, rule)
            self._derived[job.name] = matching | budget.evaluation_overrides(config) | self._initial_weights(config)
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
            self.state.init_from[request] = initial_weights.resolve_init_from(config, self.state.folder, fingerprints)
        return {"init_from": quote_path(self.state.init_from[request])}

    def job_overrides(self, job: SweepJob) -> list[str]:
        """Return the overrides that start this job as a run by itself."""
        shared = [override for override in self.state.overrides if not is_hydra_override(override)]
        return merge_overrides(
            shared, [f"{key}={value}" for key, value in (job.overrides | self.derived_overrides(job)).items()]
        )

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
            make_dirs(run_dir / ".hydra")
            write_atomic_file(run_dir / saved_config.OVERRIDES_FILE, yaml.safe_dump(overrides).encode())
            snapshot.save_snapshot(run_dir, overrides, self.conf)
            write_atomic_file(
                run_dir / saved_config.CONFIG_FILE,
                yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode(),
            )
            metadata.record_created()
        return [f"resume={run_dir}"]

    def _write_report(self) -> None:
        """Update the leaderboard and the page while jobs run."""
        from runner.reporting import leaderboard

        leaderboard.update_report(self.state.folder, is_final=self.state.status != "running")

    def finish(self, stopped: bool) -> None:
        """Write the final status and print the summary. Exits with 75 or 1 unless all jobs are completed.

        Raises UserError where a new sweep has done nothing, because every job was refused: its directory is removed.
        """
        state = self.state
        if state.is_new_dir and state.jobs and len(self.refused_jobs) == len(state.jobs):
            state.has_begun = False
            raise _error_of_all(self.refused_jobs)
        state.refresh_from_runs()
        counts = {status: sum(job.status == status for job in state.jobs) for status in STATUSES}
        is_complete = counts["completed"] == len(state.jobs)
        status = (
            "interrupted"
            if stopped
            else "failed"
            if counts["failed"]
            else "completed"
            if is_complete
            else "interrupted"
        )
        if status != state.status or state.is_stale:
            state.set_status(status)
            self.page.write()
        from runner.reporting.leaderboard import describe_sweep_end

        self.lines.end(*describe_sweep_end(state.folder))
        if status == "completed":
            return
        if any(job.needs_run for job in state.jobs):
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


class SweepStopped(Exception):
    """A signal stopped the sweep; its running jobs have saved."""


@contextmanager
def open_session(config: DictConfig, overrides: list[str]) -> Iterator[SweepSession]:
    """Create the sweep that Hydra has composed (`config`, with the typed `overrides`), or open the one to resume;
    finish it at the end.

    Everything is checked before the sweep directory exists; sweep.json with all its jobs is written before the first of
    them starts.
    """
    sweeper, launcher = validation.hydra_options(config)
    if sweeper.resume:
        state, composer = SweepState.open(Path(config.hydra.sweep.dir).absolute()), None
    else:
        state, composer = _create_state(config, overrides, sweeper, launcher)
    with state, snapshot.as_config_dir(state.folder) as conf:
        session = SweepSession(state, conf, composer)
        session.hydra_config, session.lines = config, SweepLines(config.tracker.console)
        for job in state.jobs if not sweeper.resume else ():
            session.derived_overrides(job)  # init_from=auto is resolved before the first job
        torchrun.set_restart_dir(state.folder)
        state.set_status("running")
        text = f"{f'{len(state.jobs)} jobs' if state.jobs else 'jobs of the sampler'} -> {state.folder}"
        session.lines.start(text, {"folder": str(state.folder), "jobs": len(state.jobs)})
        if not sweeper.resume:  # a resumed one may have much to read: its first job starts before
            session.page.write()
        try:
            yield session
        except (SweepStopped, KeyboardInterrupt):
            session.finish(stopped=True)
        else:
            session.finish(stopped=False)


def _create_state(
    config: DictConfig, overrides: list[str], sweeper: SweeperOptions, launcher: LauncherOptions
) -> tuple[SweepState, PointComposer]:
    params = [f"{key}={value}" for key, value in sweeper.params.items()]
    hydra_overrides = [
        override for override in config.hydra.overrides.hydra if not override.startswith(validation.LAUNCH_KEYS)
    ]
    shared, swept, is_finite = split_swept(
        [*hydra_overrides, *merge_overrides(params, overrides)], expand_ranges=sweeper.is_grid
    )
    validation.check_sweep(config, sweeper, is_finite)
    stored = validation.storable_overrides(shared)
    composer = PointComposer(shared, tree=config)
    points = sweeper.points(swept, config.sweep.zip)
    configs = validation.checked_configs(composer, points)
    check_typed_are_read([*shared, *swept], configs or [composer.config({})])
    base = budget.smallest_step(configs if sweeper.is_grid else [composer.config({})])
    budget.check_countable(configs, config.sweep.match_budget, swept)
    for job_config in configs:
        budget.matching_overrides(job_config, base, budget.resolve_budget_rule(job_config.sweep.match_budget, swept))
    if sweeper.is_grid:
        budget.warn_if_unequal(configs, base, swept)
    if any(budget.evaluation_overrides(job_config) for job_config in configs):
        print_note(
            f"jobs without evaluation are judged at their end, without validation data on the same {budget.FINAL_EVAL_ROWS} training rows"
        )
    folder = Path(config.hydra.sweep.dir).absolute()
    if not any(override.startswith(validation.SWEEP_DIR_KEY) for override in config.hydra.overrides.hydra):
        folder = contents.create_unique(folder)
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(folder)
    names = {"sweeper": validation.plugin_name(sweeper), "launcher": validation.plugin_name(launcher)}
    state = SweepState.create(
        folder, overrides=stored, swept=swept, base_rows=base.rows, base_tokens=base.tokens, **names
    )
    try:
        for point in points if sweeper.is_grid else ():
            state.add_job(point)
        snapshot.save_snapshot(state.folder, shared)
        for groups in composer.group_choices:
            snapshot.extend_snapshot(state.folder, [*shared, *groups], paths.CONF_DIR)
        state.write()
    except BaseException:
        state.discard()
        state.close()
        raise
    return state, composer
