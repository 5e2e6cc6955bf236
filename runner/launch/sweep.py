"""Sweeps: one run for every combination of words, started with --multirun and continued with resume=."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.engine.config import Config
from runner.launch import compare, fair, folders, foreign, grid, lineage, ready, relaunch, snapshot
from runner.launch import words as words_of
from runner.launch.compose import register
from runner.launch.grid import Composer, Point
from runner.launch.launcher import FIELDS, JobFailed, Stopped, check_options
from runner.launch.ledger import ENDED, Ledger, begun, read_run
from runner.launch.refusal import FAILED, INTERRUPTED, again
from runner.launch.underway import Sweep, current, is_due, is_lost
from runner.launch.words import quoted

MULTIRUN = ("--multirun", "-m")
PLACE = "hydra.sweep.dir="
HYDRA = ("hydra.", "hydra/")
OURS, COUNTED = "grid", ("grid", "basic")  # the sweeper whose points we know beforehand
LONGER = ("train.max_steps=", "train.epochs=", "train.patience=")
MANY = 50  # jobs whose checking takes so long that something should be said
STORED = ("hydra/sweeper", "hydra/sweeper/sampler", "hydra/launcher", *(f"hydra.launcher.{word}" for word in FIELDS))


def enter(typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Start a sweep: `typed` are its words, checked and with whole paths, `flags` those of Hydra that stood beside them."""
    foreign.check(typed)
    shared, swept, counted = grid.split(typed)
    composer, shared = Composer(shared), [word for word in shared if not word.startswith(PLACE)]
    tree = composer.tree({word: values[0] for word, values in swept.items()} if counted else {})
    sweeper, launcher = (tree.hydra.runtime.choices[f"hydra/{part}"] for part in ("sweeper", "launcher"))
    _check_hydra(tree, sweeper, launcher, counted, shared)
    swept |= {str(key): [str(values)] for key, values in (tree.hydra.sweeper.get("params") or {}).items()}
    points = grid.points(swept, tree.sweep.zip if sweeper == OURS else ()) if counted and sweeper in COUNTED else []
    configs = [*_checked(composer, points)] or [composer.config({})]
    base = min(map(fair.rows_of, configs))
    for config in configs:
        fair.words(config, base, fair.kept(config.sweep.fix, swept))
    if odd := fair.unequal(configs, base, swept):
        print(f"warning: {odd}", file=sys.stderr)
    if not any(word.startswith(PLACE) for word in typed):
        folders.claim(sweep=True)
    folder = Path(composer.tree(points[0] if points else {}).hydra.sweep.dir).absolute()
    with Ledger.create(folder, words=_lasting(shared), swept=swept, sweeper=sweeper, launcher=launcher, base_rows=base) as ledger:
        for point in points:
            ledger.add(point)
        for first, groups in zip([True, *[False] * len(composer.choices)], composer.choices, strict=False):
            words = [*(word for word in shared if not word.lstrip("+~").startswith(HYDRA)), *groups]
            snapshot.take(folder, words) if first else snapshot.add(folder, words, words_of.CONF)
        ledger.write()  # from here on the sweep can be continued, with all its jobs
        _run(Sweep(ledger), typed, flags, app)


def resume(folder: Path, extra: list[str], flags: list[str], app: Callable[[], None]) -> None:
    """Run what is not finished of the sweep in `folder`, and what the extra words add to it."""
    with Ledger.open(folder) as ledger:
        more, added, _ = grid.split(extra)
        stored = ledger.fields["swept"]
        _check_stored(ledger)
        foreign.check([*ledger.fields["words"], *extra])
        added |= {key: [value] for key, value in map(grid.pair, more) if key in stored}
        more = [word for word in more if word.partition("=")[0] not in stored]
        _check_more(ledger, more, added)
        if not (added or more or any(map(is_due, ledger.jobs)) or ledger.fields["sweeper"] not in COUNTED):
            return _end(Sweep(ledger), stopped=False)
        changed = snapshot.differences(folder)
        for line in changed:
            print(f"resume: {line}", file=sys.stderr)
        with snapshot.laid_out(folder) if changed else nullcontext() as conf:
            if added or more:
                _extend(ledger, more, added, conf)
            sweep = Sweep(ledger, conf)
            typed = [
                *grid.with_words(sweep.shared, (word for word in more if word.lstrip("+~").startswith(HYDRA))),
                *(f"{key}={','.join(values)}" for key, values in ledger.fields["swept"].items()),
            ]
            _run(sweep, typed, ["--multirun", *(flag for flag in flags if flag not in MULTIRUN)], app)


def _run(sweep: Sweep, typed: list[str], flags: list[str], app: Callable[[], None]) -> None:
    ledger, stopped = sweep.ledger, False
    folders.sweeping(ledger.fields["swept"])
    current.append(sweep)
    if sweep.conf:  # a swept choice may be of a file that is gone from today's
        flags = [*flags, "--config-path", str(sweep.conf)]
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
        ready.check_files(configs[-1])
        lineage.check(configs[-1])
        if number % MANY == 0:
            print(f"{number} of {len(points)} jobs checked", file=sys.stderr)
    return configs


def _check_hydra(tree: DictConfig, sweeper: str, launcher: str, counted: bool, shared: list[str]) -> None:
    if sweeper in COUNTED and not counted:
        raise ValueError(
            "this sweeper goes through lists of values, it draws none", "hydra/sweeper=" + sweeper, "add hydra/sweeper=optuna, or give the values: a,b,c"
        )
    if sweeper != OURS and tree.sweep.zip:
        raise ValueError("words go in pairs with our own sweeper only", f"sweep.zip hydra/sweeper={sweeper}", f"leave out hydra/sweeper={sweeper}")
    if word := next((word for word in shared if word.startswith("hydra.sweep.subdir=")), None):
        raise ValueError("jobs are named by their swept words", word, "leave it out; hydra.sweep.dir=DIR places the sweep")
    if launcher == "local":
        check_options(tree.hydra.launcher)


def _is_plain(word: str) -> bool:
    """Whether it sets no more than what a job's words may set, or chooses among plugins and their options."""
    key = word.partition("=")[0].lstrip("+~")
    ours = not key.startswith(HYDRA) or key in STORED or key.startswith(foreign.KEPT)
    return ours and "${" not in word and "_target_" not in word


def _lasting(words: list[str]) -> list[str]:
    """What is written down. A word to Hydra that could start or open anything is not."""
    for word in words:
        if not _is_plain(word) and not word.lstrip("+~").startswith(HYDRA):
            raise ValueError("the jobs of a sweep start at different times: nothing is looked up then", word, "write the value itself")
        if not _is_plain(word):
            print(f"{word} is not kept with the sweep: type it again behind resume=", file=sys.stderr)
    return [word for word in words if _is_plain(word)]


def _check_stored(ledger: Ledger) -> None:
    """sweep.json is data."""
    for word in [*ledger.fields["words"], *(f"{key}={value}" for key, values in ledger.fields["swept"].items() for value in values)]:
        if not _is_plain(word):
            raise ValueError("a sweep's words reach outside", f"{ledger.folder / 'sweep.json'}: {word}", "take it out there, and type it again behind resume=")


def _check_more(ledger: Ledger, more: list[str], added: dict[str, list[str]]) -> None:
    words_of.check([*more, *(f"{key}={value}" for key, values in added.items() for value in values)])
    if strange := next((key for key in added if key not in ledger.fields["swept"]), None):
        raise ValueError("the jobs of this sweep are not told apart by this word", strange, f"give one value, or start a sweep over {strange} as well")
    if word := next((word for word in more if word.startswith(("sweep.", PLACE))), None):
        raise ValueError("a sweep keeps its place and its rules", word, "leave it out, or start another sweep")


def _extend(ledger: Ledger, more: list[str], added: dict[str, list[str]], conf: Path | None) -> None:
    """New points, and new words for all jobs. Checked as a whole before anything is written."""
    swept = ledger.fields["swept"]
    shared = grid.with_words(ledger.fields["words"], more)
    composer = Composer(shared, conf or words_of.CONF)
    zipped = composer.tree(ledger.jobs[0]["words"]).sweep.zip if ledger.jobs else []
    points = grid.points({key: added.get(key, values) for key, values in swept.items()}, zipped) if added and ledger.fields["sweeper"] in COUNTED else []
    _checked(composer, points)
    plain = [word for word in more if not word.lstrip("+~").startswith(HYDRA)]
    longer = any(word.startswith(LONGER) for word in plain)  # nothing else moves a job that is completed
    jobs = [job for job in ledger.jobs if not is_lost(job) and begun(read_run(ledger.folder / job["name"]))]
    _checked(composer, [job["words"] for job in jobs] if plain else [])
    ledger.fields["words"] = _lasting(shared)
    ledger.fields["swept"] = {key: [*dict.fromkeys([*values, *added.get(key, [])])] for key, values in swept.items()}
    for point in points:
        ledger.add(point)
    sweep = Sweep(ledger, conf)
    for point in points:
        sweep.changed(ledger.add(point))  # refuses what cannot be fair
    for job in jobs if plain else ():
        keys = {word.partition("=")[0] for word in plain}
        pending = grid.with_words(plain, [f"{key}={value}" for key, value in sweep.changed(job).items() if key in keys])
        pending = grid.with_words(job.get("pending", []), pending)
        moves = longer or job["status"] != "completed"
        _check_begun(ledger.folder / job["name"], pending, moves)
        if moves:
            job["pending"] = pending
            job["given"] = [*dict.fromkeys([*job.get("given", []), *pending])]  # what else the job was continued with came from elsewhere
    ledger.write()


def _check_begun(run: Path, words: list[str], moves: bool) -> None:
    """Refuse what a run that has begun could not take, or, completed and not moved by it, would lack beside the jobs that get it."""
    from runner.engine.identity import changes

    before, after = (_facts(relaunch.planned(run, more).config) for more in ([], words))
    found = changes(before, after)
    if found["refused"]:
        raise ValueError("jobs of this sweep have begun without it", f"{run.name}: {found['refused'][0]}", "leave the word out, or start another sweep with it")
    if found["course"] and not moves:
        raise ValueError(
            "jobs of this sweep are completed without it", f"{run.name}: {found['course'][0]}", "start another sweep with it, or add train.max_steps=N to go on"
        )


def _facts(config: Config) -> dict[str, Any]:
    tree = OmegaConf.structured(config)
    values = {word: OmegaConf.select(tree, word) for word, kind in words_of.schema().items() if not is_dataclass(kind)}
    return values | {"rows of a step": fair.rows_of(config)}
