"""Train a tokenizer: `python runner/tokenizer.py path=[text.jsonl,chats.jsonl] to=my_tokenizer vocab_size=6400`."""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.corpus import Survey, TokenizerConfig, corpus
from runner.launch.small import refusing, start, typed


def train_tokenizer(cfg: TokenizerConfig) -> None:
    """Train on the rows of `cfg.path`, write `cfg.to`, and say what was left out and how well held-out rows are cut."""
    from data.chat import CHATML
    from data.formats import Source
    from data.tokenizer import train_bpe

    paths, survey = [Path(path) for path in cfg.path], Survey()
    for path in paths:
        Source.open(path)  # the last file is refused before the first is read
    tokenizer = train_bpe(corpus(paths, cfg.max_lines, survey), cfg.vocab_size, Path(cfg.to), CHATML.read_text(encoding="utf-8"))
    print(f"{tokenizer.vocab_size} words from {survey.rows} rows in {cfg.to}")
    for reason, count in survey.bad.most_common():
        print(f"left out {count}: {reason}, first at {survey.first[reason]}")
    for (name, language), texts in survey.held_out.items():
        ids = sum(map(len, tokenizer.encode_batch(texts)))
        print(f"{sum(map(len, texts)) / ids:.2f} characters a token on {len(texts)} held-out texts of {name} ({language})")


@hydra.main(version_base="1.3", config_path="../conf", config_name="tokenizer")
def main(tree: DictConfig) -> None:
    with refusing():
        train_tokenizer(typed(tree, TokenizerConfig))


if __name__ == "__main__":
    start(main, TokenizerConfig, free=("path", "to"))
