"""Serve a trained model to clients of OpenAI's HTTP interface: `python runner/serve.py run=last port=8000`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.config.resolve import resolve_model_run
from runner.serving.command import ServeConfig, serve

if __name__ == "__main__":
    run_subcommand("serve", ServeConfig, lambda cfg: serve(cfg, resolve_model_run(cfg.run)))
