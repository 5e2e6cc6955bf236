"""Train a tokenizer: `python runner/tokenizer.py path=[text.jsonl,chats.jsonl] to=my_tokenizer vocab_size=6400`.

It is evaluated on held-out rows; compare=DIR evaluates a second tokenizer on them. To compare existing tokenizers only:
`python runner/tokenizer.py path=text.jsonl tokenizer=DIR compare=DIR`.
"""

import os
import sys

if not __package__:  # started by path: replace runner/ on sys.path by the repository root
    sys.path[0] = os.path.abspath(f"{__file__}/../..")

from data.config import TokenizerConfig
from runner.cli.subcommand import run_subcommand


def train_or_compare(cfg: TokenizerConfig) -> None:
    from data.tokenize.train import train_tokenizer

    train_tokenizer(cfg)


if __name__ == "__main__":
    run_subcommand("tokenizer", TokenizerConfig, train_or_compare)
