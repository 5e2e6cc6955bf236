"""Train a tokenizer: `python runner/tokenizer.py path=[text.jsonl,chats.jsonl] to=my_tokenizer vocab_size=6400`.

It is evaluated on held-out rows; compare=DIR evaluates a second tokenizer on them. To compare existing tokenizers only:
`python runner/tokenizer.py path=text.jsonl tokenizer=DIR compare=DIR`.
"""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import hydra
from omegaconf import DictConfig

from data.tokenize.tokenizer_corpus import TokenizerConfig
from runner.cli.subcommand import reporting_user_errors, run_subcommand, to_schema
from runner.config.compose import HYDRA_VERSION_BASE


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="tokenizer")
def main(tree: DictConfig) -> None:
    from data.tokenize.train import train_tokenizer

    with reporting_user_errors():
        train_tokenizer(to_schema(tree, TokenizerConfig))


if __name__ == "__main__":
    run_subcommand(main, TokenizerConfig, free=("path", "to", "tokenizer", "compare"))
