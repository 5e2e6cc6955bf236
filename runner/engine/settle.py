"""Steps that wait to be read, and what is done about those that were not finite. No weight has moved in these, however late they are read."""

from __future__ import annotations

from runner.engine.disk import write_json
from runner.engine.found import Result, read
from runner.engine.run import Run, RunFailed, finite

UNREAD_AT_MOST = 100  # steps: what waits must not grow without end, nor the time until a failure is heard of
LOSSES_KEPT = 50  # how far back a diagnosis looks


def overdue(run: Run) -> bool:
    """Whether steps are read now though no log line is due: before a save, an evaluation or samples, for fp16, or because too many wait.
    All ranks find the same, for it depends on words and numbers of steps alone."""
    every = run.cfg.train
    return run.precision.scales or len(run.unread) >= UNREAD_AT_MOST or any(map(run.due, (every.save_every, every.eval_every, every.sample_every)))


def settle(run: Run) -> list[Result]:
    """Read what waits, in its order, and count it. Raises RunFailed after too many steps that were not finite."""
    progress = run.progress
    steps, run.unread = run.unread, []
    results = read(run.world, steps)
    for result in results:
        progress.last_losses = [*progress.last_losses, finite(result.means["loss"])][-LOSSES_KEPT:]
        progress.nonfinite_in_a_row = 0 if result.taken else progress.nonfinite_in_a_row + 1
        if not result.taken:
            progress.nonfinite += 1
            _give_up(run, result)
    return results


def _give_up(run: Run, result: Result) -> None:
    told = run.world.gather([result.found.names, result.culprit])
    names = [name for theirs, _ in told for name in theirs]
    where = f"step {result.found.step}, rows {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
    run.track.warn(f"loss {result.means['loss']}, gradient norm {result.norm}: not finite, step not taken ({where}); see diagnosis.json")
    if run.world.leads:
        _diagnose(run, names, next((culprit for _, culprit in told if culprit), None), result)
    if run.precision.name == "fp16":
        raise RunFailed(f"fp16 overflows even at a loss scale of {run.precision.scale:g} ({where}): use precision=bf16 or a smaller optimizer.lr")
    if run.progress.nonfinite_in_a_row >= run.cfg.train.max_nonfinite_steps:
        raise RunFailed(f"{run.progress.nonfinite_in_a_row} steps in a row were not finite ({where}): use a smaller optimizer.lr, or look at these rows")


def _diagnose(run: Run, names: list[str], culprit: str | None, result: Result) -> None:
    """What stood around the newest step that was given up, for whoever looks into it."""
    found = {
        "step": result.found.step,
        "rows": names,
        "loss": finite(result.means["loss"]),
        "grad_norm": finite(result.norm),
        "first_parameter": culprit,
        "scale": run.precision.scale,
        "nonfinite_in_a_row": run.progress.nonfinite_in_a_row,
        "last_losses": run.progress.last_losses,
    }
    try:
        write_json(run.folder / "diagnosis.json", found)
    except OSError as error:
        run.track.warn(f"diagnosis.json could not be written: {error}")
