"""Weights & Biases tracker: its settings, and the program that writes a run to wandb."""

from __future__ import annotations

import html
import netrc
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import UserError
from runner.tracking.config import TRACKERS, ExternalTrackerConfig
from runner.tracking.trackers.program import Experiment, ServiceLog, run_program

API_HOST = "https://api.wandb.ai"  # unless WANDB_BASE_URL is set
WANDB_EXIT_CODES = {"completed": 0, "interrupted": 75, "failed": 1}


@TRACKERS.register("wandb")
@dataclass
class WandbConfig(ExternalTrackerConfig):
    PACKAGE = "wandb"


def find_api_key(host: str) -> str | None:
    """Return the key of WANDB_API_KEY, or what `wandb login` wrote to ~/.netrc.

    It is only tested for: wandb looks for it itself.
    """
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    try:
        login = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(host).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return login[2] if login else None


class WandbLog(ServiceLog):
    def __init__(self, experiment: Experiment) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # faults of wandb are not sent to its makers
        import wandb

        run_dir = experiment.folder.parent
        if os.path.lexists(run_dir / ".wandb"):
            raise UserError("wandb would write into this folder instead of wandb/", run_dir / ".wandb", "remove it")
        host = os.environ.get("WANDB_BASE_URL") or API_HOST
        mode, reason, self.history_from = experiment.connect(find_api_key(host), host, "WANDB_MODE", "offline-run-*")
        self._wandb = wandb
        self._run = wandb.init(
            **experiment.init_arguments(),
            notes=experiment.note or None,
            dir=run_dir,
            mode=mode,
            settings=wandb.Settings(
                console="off",
                symlink=False,
                silent=True,
                # Off: wandb would record the command, packages, code and load of this process as those of the run.
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                disable_git=True,
                disable_code=True,
                save_code=False,
            ),
        )
        folder = Path(self._run.dir).parent
        self._logs = folder / "logs"
        self.location = f"{mode} ({reason}), {self._run.url if mode == 'online' else folder}"

    def samples(self, step: int, samples: list[dict[str, str]]) -> None:
        blocks = (
            f"<p><b>{html.escape(sample['prompt'])}</b></p><pre>{html.escape(sample['answer'])}</pre>"
            for sample in samples
        )
        self._run.log({"samples": self._wandb.Html("".join(blocks), inject=False)}, step=step)

    def finish(self, status: str, error: str) -> None:
        self._run.summary["status"] = status
        if error:
            self._run.summary["error"] = error
        self._run.finish(exit_code=WANDB_EXIT_CODES[status])
        for path in self._logs.glob("*"):
            if path.is_symlink():  # to a log in ~/.cache; a run directory has no links
                path.unlink()


if __name__ == "__main__":
    run_program(WandbLog)
