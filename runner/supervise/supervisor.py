"""What happens between a failure of the training processes and their restart."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

from common.errors import Interrupted, Outcome, TrainingError, print_note, print_safely
from common.guarded_files import read_from
from runner.checkpoint.atomic_dir import STEP_NAME
from runner.checkpoint.format import CHECKPOINTS_DIR, step_of
from runner.diagnostics.symptoms import troubleshooting
from runner.engine.config import Config
from runner.planning.facts.micro_batch import half_micro_batch, smaller_micro_batch
from runner.run_dir.contents.fields import timestamp
from runner.run_dir.metadata import RunMetadata
from runner.supervise.failures import Failure, FailureKind, classify_failure, count_oom_kills
from runner.supervise.incidents import append_incident
from runner.supervise.liveness import Liveness
from runner.supervise.policy import RestartPolicy

LOG_LINES, LOG_BYTES = 12, 1 << 14  # of train.log, in a record
CHILD_POLL_SECONDS = 0.05


class Supervisor:
    """Decides on restarts and records incidents. Without train.supervise it restarts ranks at once, up to distributed.max_restarts times in all."""

    def __init__(self, config: Config, metadata: RunMetadata) -> None:
        self.config = config  # of the next attempt
        self.restarts = 0  # so far
        self._metadata, self._is_on, self._oom_kills = metadata, config.train.supervise, count_oom_kills()
        options = config.supervise
        self._policy = RestartPolicy(options.max_restarts, options.delay) if self._is_on else RestartPolicy(config.distributed.max_restarts, counts_all=True)

    def watch(self, count: int) -> Liveness | None:
        """Return what watches the `count` ranks of one attempt. Without train.supervise it only knows which of several ranks a collective waits for."""
        try:
            return Liveness(count, self.config.supervise.hang_timeout * 60 if self._is_on else 0)
        except OSError as error:
            print_note(
                f"warning: the ranks are not watched, a hang is not noticed: {error.strerror or error}; set TMPDIR to a folder on a disk with free space"
            )
            return None

    def describe(self, code: int, rank: int, error: TrainingError, is_hanging: bool) -> Failure:
        """Return the failure of `rank`, which failed first; run.json has been read again."""
        before, self._oom_kills = self._oom_kills, count_oom_kills()
        kind = classify_failure(code, str(error), self._metadata.fields.get("outcome"), is_hanging, self._oom_kills - before)
        return Failure(kind, code, rank, error)

    def handle(self, failure: Failure, stacks: list[str], is_stopping: Callable[[], bool]) -> None:
        """Return when the ranks are to be started again, with `config`. Raises the error of `failure` if not, Interrupted if `is_stopping()` meanwhile."""
        decision = self._policy.decide(failure.kind, self._saved_step())
        restarts = decision.restarts and not is_stopping()
        action = "no restart: a stop was requested" if is_stopping() else decision.action + (self._adapt(failure.kind) if restarts else "")
        if self._is_on:
            self._record(failure, action, stacks)
            print_safely(f"{failure.error}; {action}", sys.stderr)
        elif restarts:
            print_safely(f"{failure.error}; {action}", sys.stderr)
        if advice := self._advice(failure.kind):
            print_safely(advice, sys.stderr)
        if self._is_on and failure.kind == FailureKind.STOPPED:
            self._interrupt()
        if not restarts:
            raise failure.error
        self._wait(decision.delay, is_stopping)
        self.restarts += 1

    def _adapt(self, kind: FailureKind) -> str:
        """Halve the micro-batch after a lack of memory, if asked for; return what changes. The rows of a step stay, their sums are rounded differently."""
        train = self.config.train
        if kind != FailureKind.OUT_OF_MEMORY or not (self._is_on and self.config.supervise.halve_batch):
            return ""
        if (smaller := smaller_micro_batch(train.batch_size, train.accumulation_steps)) is None:
            return ""
        changed = dataclasses.replace(train, batch_size=smaller.size, accumulation_steps=smaller.accumulation)
        self.config = dataclasses.replace(self.config, train=changed)
        return f", {smaller.overrides}"

    def _advice(self, kind: FailureKind) -> str:
        """Return what to type where the process could not say it itself: it was killed."""
        train = self.config.train
        if kind == FailureKind.HANG:
            return f"hang: the stacks show what the process waits for; {troubleshooting('hang')}"
        if kind != FailureKind.OUT_OF_MEMORY or (self._is_on and self.config.supervise.halve_batch):
            return ""
        same_rows, half = (find(train.batch_size, train.accumulation_steps) for find in (smaller_micro_batch, half_micro_batch))
        fix = same_rows.overrides if same_rows is not None else "train.activation_checkpointing=full"
        fix += f" (or {half.overrides}: {half.changes})" if half is not None else ""
        return f"out of memory: {fix} needs less, python runner/plan.py with the same overrides says how much; {troubleshooting('out-of-memory')}"

    def _record(self, failure: Failure, action: str, stacks: list[str]) -> None:
        folder, fields = self._metadata.folder, self._metadata.fields
        try:
            lines = read_from(folder / "train.log", 0, LOG_BYTES).decode("utf-8", "replace").splitlines()[-LOG_LINES:]
        except OSError:
            lines = []
        where = {"time": timestamp(), "attempt": fields["attempt"], "step": self._saved_step(), "rank": failure.rank}
        ended = {"kind": failure.kind, "exit_code": failure.code if failure.code >= 0 else None, "signal": failure.signal_name, "error": str(failure.error)}
        append_incident(folder, {**where, **ended, "action": action, "last_lines": lines, "stacks": stacks})

    def _wait(self, seconds: float, is_stopping: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if is_stopping():
                self._interrupt()
            time.sleep(CHILD_POLL_SECONDS)

    def _interrupt(self) -> None:
        """End as after a stop request: the newest checkpoint is what can be resumed."""
        self._metadata.finish(Outcome.INTERRUPTED)
        raise Interrupted(self._saved_step(), self._metadata.folder)

    def _saved_step(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none. run.json learns of a checkpoint later than the disk."""
        names = [path.name for path in (self._metadata.folder / CHECKPOINTS_DIR).glob("step-*") if STEP_NAME.fullmatch(path.name)]
        return max(map(step_of, names), default=0)
