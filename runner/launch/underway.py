"""A sweep under way: what Hydra's sweepers and launchers ask of it, whichever they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from runner.engine.config import Config
from runner.engine.disk import make_folder, replace
from runner.launch import compare, fair, grid, lineage, refusal, snapshot, stored
from runner.launch import words as words_of
from runner.launch.children import Children
from runner.launch.grid import Composer
from runner.launch.ledger import Job, Ledger, begun, read_run
from runner.launch.record import Record
from runner.launch.words import quoted

current: list[Sweep] = []  # the sweep of this process, for Hydra's plugins


class Sweep:
    """A sweep that is being run: what stands in its ledger, and the words of its jobs."""

    def __init__(self, ledger: Ledger, conf: Path = words_of.CONF) -> None:
        self.ledger, self.conf = ledger, conf  # conf: the sweep's own copy, laid out; today's may be another before the next job begins
        self.shared: list[str] = ledger.fields["words"]
        self.composer = Composer(self.shared, conf)
        self._changed: dict[str, dict[str, str]] = {}  # by job, what fairness changes; composed once
        self._complained = False

    def config(self, job: Job) -> Config:
        return self.composer.config(job["words"])

    def changed(self, job: Job) -> dict[str, str]:
        """What `sweep.fix` and `sweep.lr_scale` make different in this job, and what init_from=auto has come to."""
        if job["name"] not in self._changed:
            config = self.config(job)
            fix = fair.kept(config.sweep.fix, self.ledger.fields["swept"])
            self._changed[job["name"]] = fair.words(config, self.ledger.fields["base_rows"], fix) | self._weights(config)
        return self._changed[job["name"]]

    def _weights(self, config: Config) -> dict[str, str]:
        """init_from=auto is asked once for all jobs that ask the same: a run that ends meanwhile would part the later ones from the earlier."""
        if config.init_from != "auto" or config.stage.after is None:
            return {}
        shared = lineage.fingerprints(config)
        asked = " ".join([config.stage.after, *shared.values()])
        found = self.ledger.fields.setdefault("init_from", {})
        if asked not in found:
            found[asked] = lineage.resolve(config, self.ledger.folder, shared)
        return {"init_from": quoted(found[asked])}

    def job_of(self, words: Sequence[str]) -> Job:
        """The job that a sweeper means; one that it has only now thought of is new."""
        pairs = {key: value for key, _, value in (word.partition("=") for word in words)}
        return self.ledger.add({key: pairs[key] for key in self.ledger.fields["swept"] if key in pairs})

    def plain_words(self, job: Job) -> list[str]:
        """What one would type for this job alone."""
        mine = [word for word in self.shared if not word.startswith(("hydra.", "hydra/"))]
        return grid.with_words(mine, [f"{key}={value}" for key, value in (job["words"] | self.changed(job)).items()])

    def child_words(self, job: Job) -> list[str]:
        """What the job's own process is given: a run that has begun is continued from what it wrote down itself."""
        folder = self.ledger.folder / job["name"]
        if begun(read_run(folder)):
            return [f"resume={folder}", *job.get("pending", [])]
        try:
            self._lay(job, folder)
        except (ValueError, OSError) as error:  # another trains there, or the disk is full: the job will say so itself, and its sweep goes on
            print(f"warning: {job['name']} cannot be prepared: {error.args[0] if refusal.is_refusal(error) else error}", file=sys.stderr)
        return [f"resume={folder}"]

    def _lay(self, job: Job, folder: Path) -> None:
        """A run that has not begun, composed from the files and words of the sweep, whatever conf/ says by now."""
        words, tree = self.plain_words(job), self.composer.of_the_job(job["words"] | self.changed(job))
        config = stored.lasting(OmegaConf.to_container(tree, resolve=True), OmegaConf.to_container(tree))
        with Record.open(folder):
            make_folder(folder / ".hydra")
            replace(folder / stored.WORDS, yaml.safe_dump(words).encode())
            snapshot.take(folder, words, self.conf)
            replace(folder / stored.CONFIG, yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode())

    def children(self) -> Children:
        return Children(self.ledger, self.child_words, self.report)

    def report(self) -> None:
        """Leaderboard and page as of now. No disk trouble there ends a sweep."""
        try:
            compare.update(self.ledger.folder)
        except OSError as error:
            if not self._complained:
                self._complained = True
                print(f"warning: the report of the sweep cannot be written: {error}", file=sys.stderr)


def is_due(job: Job) -> bool:
    """Not completed, or to be continued with more words."""
    return not is_lost(job) and (bool(job.get("pending")) or job["status"] != "completed")


def is_lost(job: Job) -> bool:
    """It diverged, and would again, whatever words it still waits for."""
    return job["status"] == "failed" and job["loss"] == "inf"
