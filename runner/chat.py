"""Chat with a trained model: `python runner/chat.py run=last`, or print one answer: `python runner/chat.py run=last prompt="Where does Ludo live?"`."""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from runner.cli.subcommand import run_subcommand
from runner.config.resolve import resolve_model_run
from runner.inference.chat import ChatConfig, chat

if __name__ == "__main__":
    run_subcommand("chat", ChatConfig, lambda cfg: chat(cfg, resolve_model_run(cfg.run)))
