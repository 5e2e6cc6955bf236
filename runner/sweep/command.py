"""Sweeps: one run for every combination of words, started with --multirun and continued with resume=."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from common import paths
from common.errors import resume_command
from common.exit_codes import FAILED, INTERRUPTED
from runner.config.compose import register_configs
from runner.config.overrides import hydra_quote
from runner.engine.config import Config
from runner.launch import preflight, torchrun
from runner.reporting import leaderboard
from runner.run_dir import config_snapshot, initial_weights, naming
from runner.run_dir.metadata import has_started, read_run_metadata
from runner.sweep import budget, extend, grid, validation
from runner.sweep.grid import GridPoint, PointComposer
from runner.sweep.plugins import external
from runner.sweep.plugins.local import SweepJobFailed, SweepStopped
from runner.sweep.session import SweepSession, current_sessions, has_failed, needs_run
from runner.sweep.state import ENDED_STATUSES, SweepJob, SweepState
from runner.sweep.validation import FINITE_SWEEPERS, GRID_SWEEPER, HYDRA_PREFIXES, SWEEP_DIR_KEY

MULTIRUN_FLAG_NAMES = ("--multirun", "-m")
PROGRESS_EVERY = 50  # jobs whose checking takes so long that something should be said


def start_sweep(typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Start a sweep: `typed` are its words, checked and with whole paths, `flags` those of Hydra that stood beside them."""
    external.check_plugins(typed)
    shared, swept, counted = grid.split_swept(typed)
    composer, shared = PointComposer(shared), [word for word in shared if not word.startswith(SWEEP_DIR_KEY)]
    tree = composer.tree({word: values[0] for word, values in swept.items()} if counted else {})
    sweeper, launcher = validation.check_hydra_choices(tree, counted, shared)
    swept |= {str(key): [str(values)] for key, values in (tree.hydra.sweeper.get("params") or {}).items()}
    points = grid.cartesian_points(swept, tree.sweep.zip if sweeper == GRID_SWEEPER else ()) if counted and sweeper in FINITE_SWEEPERS else []
    configs = [*_checked_configs(composer, points)] or [composer.config({})]
    base = min(map(budget.rows_per_step, configs))
    for config in configs:
        budget.matching_overrides(config, base, budget.resolve_budget_rule(config.sweep.match_budget, swept))
    _warn_unequal_budget(configs, base, swept)
    if not any(word.startswith(SWEEP_DIR_KEY) for word in typed):
        naming.create_unique(sweep=True)
    folder = Path(composer.tree(points[0] if points else {}).hydra.sweep.dir).absolute()
    with SweepState.create(folder, overrides=validation.storable_overrides(shared), swept=swept, sweeper=sweeper, launcher=launcher, base_rows=base) as state:
        for point in points:
            state.add(point)
        for first, groups in zip([True, *[False] * len(composer.choices)], composer.choices, strict=False):
            words = [*(word for word in shared if not word.lstrip("+~").startswith(HYDRA_PREFIXES)), *groups]
            config_snapshot.save_snapshot(folder, words) if first else config_snapshot.extend_snapshot(folder, words, paths.CONF_DIR)
        state.write()  # from here on the sweep can be continued, with all its jobs
        with config_snapshot.as_config_dir(folder) as conf:
            sweep = SweepSession(state, conf)
            for job in state.jobs:
                sweep.derived_overrides(job)  # where weights come from is decided before the first job
            _run_jobs(sweep, typed, flags, app)


def resume_sweep(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Run what is not finished of the sweep in `folder`, and what the extra words add to it."""
    with SweepState.open(folder) as state, config_snapshot.as_config_dir(folder) as conf:
        more, added = parse_additions(state, extra, conf)
        if not (added or more or any(map(needs_run, state.jobs)) or state.fields["sweeper"] not in FINITE_SWEEPERS):
            return _finish(SweepSession(state), stopped=False)
        changed = config_snapshot.changed_files(folder)
        for line in changed:
            print(f"resume: {line}", file=sys.stderr)
        if added or more:
            _extend(state, more, added, conf)
        sweep = SweepSession(state, conf)
        typed = [
            *grid.merge_overrides(sweep.shared, (word for word in more if word.lstrip("+~").startswith(HYDRA_PREFIXES))),
            *(f"{key}={','.join(values)}" for key, values in state.fields["swept"].items()),
        ]
        from_copy = ["--config-path", str(conf)] if changed else []  # a swept choice may be of a file that is gone from today's
        _run_jobs(sweep, typed, ["--multirun", *(flag for flag in flags if flag not in MULTIRUN_FLAG_NAMES), *from_copy], app)


def parse_additions(state: SweepState, extra: list[str], conf: Path) -> tuple[list[str], dict[str, list[str]]]:
    """(words for all jobs, values of swept words) of what is typed behind resume=. Refuses what this sweep cannot take."""
    more, added, _ = grid.split_swept(extra, conf)
    stored = state.fields["swept"]
    validation.check_stored_overrides(state)
    chosen = [f"hydra/{part}={state.fields[part]}" for part in ("sweeper", "launcher") if part in state.fields]
    external.check_plugins(grid.merge_overrides(grid.merge_overrides(chosen, state.fields["overrides"]), extra))
    added |= {key: [value] for key, value in map(grid.split_override, more) if key in stored}
    added = {key: grid.canonicalize(key, values, known=stored.get(key, ())) for key, values in added.items()}
    more = [word for word in more if word.partition("=")[0] not in stored]
    validation.check_additions(state, more, added, conf)
    return more, added


def pending_overrides(sweep: SweepSession, job: SweepJob, plain: list[str]) -> list[str]:
    """What a job that has begun is continued with: these words for all jobs, by its share, and those it still waits for."""
    keys = {word.partition("=")[0] for word in plain}
    share = grid.merge_overrides(plain, [f"{key}={value}" for key, value in sweep.derived_overrides(job).items() if key in keys])
    return grid.merge_overrides(job.get("pending_overrides", []), share)


def _run_jobs(sweep: SweepSession, typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    state, stopped = sweep.state, False
    torchrun.set_restart_dir(state.folder)
    naming.set_swept_keys(state.fields["swept"])
    current_sessions.append(sweep)
    sys.argv[1:] = [*flags, *(word for word in typed if not word.startswith(SWEEP_DIR_KEY)), SWEEP_DIR_KEY + hydra_quote(str(state.folder))]
    register_configs()
    state.set_status("running")
    print(f"{len(state.jobs) or 'a sampler chooses the'} jobs -> {state.folder}", flush=True)
    try:
        app()
    except (SweepStopped, KeyboardInterrupt):
        stopped = True
    except SweepJobFailed:
        pass  # it stands in the state, and has been said
    _finish(sweep, stopped)


def _finish(sweep: SweepSession, stopped: bool) -> None:
    """The last word, and the exit code."""
    state = sweep.state
    state.refresh_from_runs()
    found = {status: sum(job["status"] == status for job in state.jobs) for status in ("new", *ENDED_STATUSES)}
    left = found["new"] + found["interrupted"] > 0
    status = "interrupted" if stopped else "failed" if found["failed"] else "interrupted" if left else "completed"
    if status != state.fields["status"] or state.stale:
        state.set_status(status)
        sweep.report()
        if sys.stdout.isatty():
            print(leaderboard.leaderboard_text(state.folder))
    print(f"{state.folder}: {len(state.jobs)} jobs: {', '.join(f'{count} {name}' for name, count in found.items() if count)}")
    if status == "completed":
        return
    if any(map(needs_run, state.jobs)):
        print(f"continue with: {resume_command(state.folder)}", file=sys.stderr)
    sys.exit(INTERRUPTED if status == "interrupted" else FAILED)


def _checked_configs(composer: PointComposer, points: list[GridPoint]) -> list[Config]:
    """Every job's config, so that job 7 cannot fail on a typo after six have trained."""
    configs = []
    for number, point in enumerate(points, start=1):
        configs.append(composer.config(point))
        preflight.check_inputs(configs[-1])
        initial_weights.check_init_from(configs[-1])
        if number % PROGRESS_EVERY == 0:
            print(f"{number} of {len(points)} jobs checked", file=sys.stderr)
    return configs


def _warn_unequal_budget(configs: list[Config], base: int, swept: Iterable[str]) -> None:
    if odd := budget.budget_warning(configs, base, swept):
        print(f"warning: {odd}", file=sys.stderr)


def _extend(state: SweepState, more: list[str], added: dict[str, list[str]], conf: Path) -> None:
    """New points, and new words for all jobs. Checked as a whole before anything is written."""
    swept = state.fields["swept"]
    shared = grid.merge_overrides(state.fields["overrides"], more)
    composer = PointComposer(shared, conf)
    first = composer.tree(state.jobs[0]["overrides"] if state.jobs else {})
    validation.check_hydra_choices(first, True, more)
    points = (
        grid.cartesian_points({key: added.get(key, values) for key, values in swept.items()}, first.sweep.zip)
        if added and state.fields["sweeper"] in FINITE_SWEEPERS
        else []
    )
    _checked_configs(composer, points)
    _warn_unequal_budget(
        [composer.config(point) for point in [*(job["overrides"] for job in state.jobs if not has_failed(job)), *points]], state.fields["base_rows"], swept
    )
    plain = [word for word in more if not word.lstrip("+~").startswith(HYDRA_PREFIXES)]
    jobs = [job for job in state.jobs if not has_failed(job) and has_started(read_run_metadata(state.folder / job["name"]))]
    _checked_configs(composer, [job["overrides"] for job in jobs] if plain else [])
    former = SweepSession(state, conf)
    given = {job["name"]: int(former.derived_overrides(job).get("train.max_steps", former.config(job).train.max_steps)) for job in jobs}
    state.fields["overrides"] = validation.storable_overrides(shared)
    state.fields["swept"] = {key: [*dict.fromkeys([*values, *added.get(key, [])])] for key, values in swept.items()}
    for point in points:
        state.add(point)
    sweep = SweepSession(state, conf)
    for point in points:
        sweep.derived_overrides(state.add(point))  # refuses what cannot be fair
    for job in jobs if plain else ():
        if words := extend.overrides_for_job(state.folder / job["name"], job, pending_overrides(sweep, job, plain), given[job["name"]]):
            job["pending_overrides"] = words
            job["applied_overrides"] = [*dict.fromkeys([*job.get("applied_overrides", []), *words])]  # what else the job was continued with came from elsewhere
    state.write()
