"""SwanLab tracker: its settings, and the program that writes a run to SwanLab.

SwanLab writes its buffer only when it finishes, so a trainer that is killed would leave an unreadable file; the program
sees the end of its stdin instead and finishes the record as crashed.
"""

from __future__ import annotations

from dataclasses import dataclass

from runner.tracking.config import TRACKERS, ExternalTrackerConfig
from runner.tracking.trackers.program import Experiment, ServiceLog, run_program

SWANLAB_STATES = {"completed": "success", "interrupted": "aborted", "failed": "crashed"}


@TRACKERS.register("swanlab")
@dataclass
class SwanlabConfig(ExternalTrackerConfig):
    PACKAGE = "swanlab"


class SwanlabLog(ServiceLog):
    def __init__(self, experiment: Experiment) -> None:
        import swanlab

        settings = swanlab.Settings(
            interactive=False,
            log_dir=str(experiment.folder),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
            # Off: SwanLab would record the command, packages and load of this process as those of the run.
            probe=swanlab.Settings.Probe(monitor=False, requirements=False, git=False, runtime=False),
        )
        mode, reason, self.history_from = experiment.connect(
            settings.api_key, settings.api_host, "SWANLAB_MODE", "run-*-*"
        )
        self._run = swanlab.init(
            **experiment.init_arguments(), description=experiment.note or None, mode=mode, settings=settings
        )
        self.location = f"{mode} ({reason}), {self._run.url if mode == 'online' else self._run.dir}"

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        answers, prompts = [sample["answer"] for sample in samples], [sample["prompt"] for sample in samples]
        self._run.log_text(key="samples", data=answers, caption=prompts, step=step)

    def finish(self, status: str, error: str) -> None:
        self._run.finish(SWANLAB_STATES[status], error=error or None)


if __name__ == "__main__":
    run_program(SwanlabLog)
