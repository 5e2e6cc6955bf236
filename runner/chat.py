"""Chat with a trained model: `python runner/chat.py run=last`; one answer: `python runner/chat.py run=last prompt="Where does Ludo live?"`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.cli.subcommand import reporting_user_errors, resolve_model_run, run_subcommand, to_schema
from runner.config.compose import HYDRA_VERSION_BASE
from runner.inference.chat import ChatConfig, chat


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="chat")
def main(tree: DictConfig) -> None:
    with reporting_user_errors():
        cfg = to_schema(tree, ChatConfig)
        chat(cfg, resolve_model_run(cfg.run))


if __name__ == "__main__":
    run_subcommand(main, ChatConfig, free=("run", "prompt", "system"))
