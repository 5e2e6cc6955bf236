"""Write a trained model for other programs, and compare it: `python runner/export.py run=last to=my_model format=gguf dtype=q8_0`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.config.resolve import resolve_model_run
from runner.inference.export.command import export
from runner.inference.export.formats import ExportSettings

if __name__ == "__main__":
    run_subcommand("export", ExportSettings, lambda cfg: export(cfg, resolve_model_run(cfg.run)))
