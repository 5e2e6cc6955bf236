"""Sweeps: one run for every combination of words, started with --multirun and continued with resume=."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from runner.engine.config import Config
from runner.launch import accept, compare, fair, folders, foreign, further, grid, lineage, ready, snapshot, torchrun
from runner.launch import words as words_of
from runner.launch.accept import COUNTED, HYDRA, OURS, PLACE
from runner.launch.compose import register
from runner.launch.grid import Composer, Point
from runner.launch.launcher import JobFailed, Stopped
from runner.launch.ledger import ENDED, Job, Ledger, begun, read_run
from runner.launch.refusal import FAILED, INTERRUPTED, again
from runner.launch.underway import Sweep, current, is_due, is_lost
from runner.launch.words import quoted

MULTIRUN = ("--multirun", "-m")
MANY = 50  # jobs whose checking takes so long that something should be said


def enter(typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Start a sweep: `typed` are its words, checked and with whole paths, `flags` those of Hydra that stood beside them."""
    foreign.check(typed)
    shared, swept, counted = grid.split(typed)
    composer, shared = Composer(shared), [word for word in shared if not word.startswith(PLACE)]
    tree = composer.tree({word: values[0] for word, values in swept.items()} if counted else {})
    sweeper, launcher = accept.check_hydra(tree, counted, shared)
    swept |= {str(key): [str(values)] for key, values in (tree.hydra.sweeper.get("params") or {}).items()}
    points = grid.points(swept, tree.sweep.zip if sweeper == OURS else ()) if counted and sweeper in COUNTED else []
    configs = [*_checked(composer, points)] or [composer.config({})]
    base = min(map(fair.rows_of, configs))
    for config in configs:
        fair.words(config, base, fair.kept(config.sweep.fix, swept))
    _warn(configs, base, swept)
    if not any(word.startswith(PLACE) for word in typed):
        folders.claim(sweep=True)
    folder = Path(composer.tree(points[0] if points else {}).hydra.sweep.dir).absolute()
    with Ledger.create(folder, words=accept.lasting(shared), swept=swept, sweeper=sweeper, launcher=launcher, base_rows=base) as ledger:
        for point in points:
            ledger.add(point)
        for first, groups in zip([True, *[False] * len(composer.choices)], composer.choices, strict=False):
            words = [*(word for word in shared if not word.lstrip("+~").startswith(HYDRA)), *groups]
            snapshot.take(folder, words) if first else snapshot.add(folder, words, words_of.CONF)
        ledger.write()  # from here on the sweep can be continued, with all its jobs
        with snapshot.laid_out(folder) as conf:
            sweep = Sweep(ledger, conf)
            for job in ledger.jobs:
                sweep.changed(job)  # where weights come from is decided before the first job
            _run(sweep, typed, flags, app)


def resume(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Run what is not finished of the sweep in `folder`, and what the extra words add to it."""
    with Ledger.open(folder) as ledger, snapshot.laid_out(folder) as conf:
        more, added = asked(ledger, extra, conf)
        if not (added or more or any(map(is_due, ledger.jobs)) or ledger.fields["sweeper"] not in COUNTED):
            return _end(Sweep(ledger), stopped=False)
        changed = snapshot.differences(folder)
        for line in changed:
            print(f"resume: {line}", file=sys.stderr)
        if added or more:
            _extend(ledger, more, added, conf)
        sweep = Sweep(ledger, conf)
        typed = [
            *grid.with_words(sweep.shared, (word for word in more if word.lstrip("+~").startswith(HYDRA))),
            *(f"{key}={','.join(values)}" for key, values in ledger.fields["swept"].items()),
        ]
        from_copy = ["--config-path", str(conf)] if changed else []  # a swept choice may be of a file that is gone from today's
        _run(sweep, typed, ["--multirun", *(flag for flag in flags if flag not in MULTIRUN), *from_copy], app)


def asked(ledger: Ledger, extra: list[str], conf: Path) -> tuple[list[str], dict[str, list[str]]]:
    """(words for all jobs, values of swept words) of what is typed behind resume=. Refuses what this sweep cannot take."""
    more, added, _ = grid.split(extra, conf)
    stored = ledger.fields["swept"]
    accept.check_stored(ledger)
    chosen = [f"hydra/{part}={ledger.fields[part]}" for part in ("sweeper", "launcher") if part in ledger.fields]
    foreign.check(grid.with_words(grid.with_words(chosen, ledger.fields["words"]), extra))
    added |= {key: [value] for key, value in map(grid.pair, more) if key in stored}
    added = {key: grid.alike(key, values, known=stored.get(key, ())) for key, values in added.items()}
    more = [word for word in more if word.partition("=")[0] not in stored]
    accept.check_more(ledger, more, added, conf)
    return more, added


def pending(sweep: Sweep, job: Job, plain: list[str]) -> list[str]:
    """What a job that has begun is continued with: these words for all jobs, by its share, and those it still waits for."""
    keys = {word.partition("=")[0] for word in plain}
    share = grid.with_words(plain, [f"{key}={value}" for key, value in sweep.changed(job).items() if key in keys])
    return grid.with_words(job.get("pending", []), share)


def _run(sweep: Sweep, typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    ledger, stopped = sweep.ledger, False
    torchrun.keep(ledger.folder)
    folders.sweeping(ledger.fields["swept"])
    current.append(sweep)
    sys.argv[1:] = [*flags, *(word for word in typed if not word.startswith(PLACE)), PLACE + quoted(str(ledger.folder))]
    register()
    ledger.finish("running")
    print(f"{len(ledger.jobs) or 'a sampler chooses the'} jobs -> {ledger.folder}", flush=True)
    try:
        app()
    except (Stopped, KeyboardInterrupt):
        stopped = True
    except JobFailed:
        pass  # it stands in the ledger, and has been said
    _end(sweep, stopped)


def _end(sweep: Sweep, stopped: bool) -> None:
    """The last word, and the exit code."""
    ledger = sweep.ledger
    ledger.catch_up()
    found = {status: sum(job["status"] == status for job in ledger.jobs) for status in ("new", *ENDED)}
    left = found["new"] + found["interrupted"] > 0
    status = "interrupted" if stopped else "failed" if found["failed"] else "interrupted" if left else "completed"
    if status != ledger.fields["status"] or ledger.behind:
        ledger.finish(status)
        sweep.report()
        if sys.stdout.isatty():
            print(compare.terminal(ledger.folder))
    print(f"{ledger.folder}: {len(ledger.jobs)} jobs: {', '.join(f'{count} {name}' for name, count in found.items() if count)}")
    if status == "completed":
        return
    if any(map(is_due, ledger.jobs)):
        print(f"continue with: {again(ledger.folder)}", file=sys.stderr)
    sys.exit(INTERRUPTED if status == "interrupted" else FAILED)


def _checked(composer: Composer, points: list[Point]) -> list[Config]:
    """Every job's config, so that job 7 cannot fail on a typo after six have trained."""
    configs = []
    for number, point in enumerate(points, start=1):
        configs.append(composer.config(point))
        ready.check(configs[-1])
        lineage.check(configs[-1])
        if number % MANY == 0:
            print(f"{number} of {len(points)} jobs checked", file=sys.stderr)
    return configs


def _warn(configs: list[Config], base: int, swept: Iterable[str]) -> None:
    if odd := fair.unequal(configs, base, swept):
        print(f"warning: {odd}", file=sys.stderr)


def _extend(ledger: Ledger, more: list[str], added: dict[str, list[str]], conf: Path) -> None:
    """New points, and new words for all jobs. Checked as a whole before anything is written."""
    swept = ledger.fields["swept"]
    shared = grid.with_words(ledger.fields["words"], more)
    composer = Composer(shared, conf)
    first = composer.tree(ledger.jobs[0]["words"] if ledger.jobs else {})
    accept.check_hydra(first, True, more)
    points = (
        grid.points({key: added.get(key, values) for key, values in swept.items()}, first.sweep.zip) if added and ledger.fields["sweeper"] in COUNTED else []
    )
    _checked(composer, points)
    _warn([composer.config(point) for point in [*(job["words"] for job in ledger.jobs if not is_lost(job)), *points]], ledger.fields["base_rows"], swept)
    plain = [word for word in more if not word.lstrip("+~").startswith(HYDRA)]
    jobs = [job for job in ledger.jobs if not is_lost(job) and begun(read_run(ledger.folder / job["name"]))]
    _checked(composer, [job["words"] for job in jobs] if plain else [])
    former = Sweep(ledger, conf)
    given = {job["name"]: int(former.changed(job).get("train.max_steps", former.config(job).train.max_steps)) for job in jobs}
    ledger.fields["words"] = accept.lasting(shared)
    ledger.fields["swept"] = {key: [*dict.fromkeys([*values, *added.get(key, [])])] for key, values in swept.items()}
    for point in points:
        ledger.add(point)
    sweep = Sweep(ledger, conf)
    for point in points:
        sweep.changed(ledger.add(point))  # refuses what cannot be fair
    for job in jobs if plain else ():
        if words := further.words_for(ledger.folder / job["name"], job, pending(sweep, job, plain), given[job["name"]]):
            job["pending"] = words
            job["given"] = [*dict.fromkeys([*job.get("given", []), *words])]  # what else the job was continued with came from elsewhere
    ledger.write()
