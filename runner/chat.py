"""Talk to a trained model: `python runner/chat.py run=last`, or for one answer `python runner/chat.py run=last prompt="Where does Ludo live?"`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from runner.launch.compose import AS_OF
from runner.launch.small import find, refusing, start, typed
from runner.trained.talk import ChatConfig, talk


@hydra.main(**AS_OF, config_path="../conf", config_name="chat")
def main(tree: DictConfig) -> None:
    with refusing():
        cfg = typed(tree, ChatConfig)
        talk(cfg, find(cfg.run))


if __name__ == "__main__":
    start(main, ChatConfig, free=("run", "prompt", "system"))
