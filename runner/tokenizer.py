"""Train a tokenizer: `python runner/tokenizer.py path=[text.jsonl,chats.jsonl] to=my_tokenizer vocab_size=6400`.

It is measured on rows that were held out; compare=DIR puts another tokenizer beside it.
Two that exist already are measured by `python runner/tokenizer.py path=text.jsonl tokenizer=DIR compare=DIR`.
"""

import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

import hydra
from omegaconf import DictConfig

from data.tokenize.tokenizer_corpus import CorpusStats, TokenizerConfig, TokenizerReport, iter_corpus, measure_tokenizer
from runner.cli.subcommand import reporting_user_errors, run_subcommand, to_schema
from runner.config.compose import HYDRA_VERSION_BASE


def train_tokenizer(cfg: TokenizerConfig) -> None:
    """Train on the rows of `cfg.path` and write `cfg.to`, or take `cfg.tokenizer`; say what was left out and how held-out rows are cut."""
    from data.sources.files import resolve_sources
    from data.tokenize.chat_template import CHATML
    from data.tokenize.tokenizer import Tokenizer
    from data.tokenize.train import train_bpe

    sources = [source for found in resolve_sources(cfg.path) for source in found]  # the last file is refused before the first is read
    other = Tokenizer.load(Path(cfg.compare)) if cfg.compare else None
    survey = CorpusStats()
    texts = iter_corpus(sources, cfg.max_lines, survey)
    if cfg.tokenizer:
        tokenizer = Tokenizer.load(Path(cfg.tokenizer))
        read = sum(1 for _ in texts)
        print(f"{read} texts of {survey.rows} rows passed over")
    else:
        tokenizer = train_bpe(texts, cfg.vocab_size, Path(str(cfg.to)), CHATML.read_text(encoding="utf-8"))
        print(f"{tokenizer.vocab_size} words from {survey.rows} rows in {cfg.to}")
    for reason, count in survey.bad.most_common():
        print(f"left out {count}: {reason}, first at {survey.first[reason]}")
    print(table({str(each.folder): measure_tokenizer(each, survey.held_out) for each in (tokenizer, other) if each}, survey))


def table(measures: dict[str, TokenizerReport], survey: CorpusStats) -> str:
    """One column a tokenizer."""
    lines = [["", *measures], ["vocabulary", *(f"{each.vocabulary}" for each in measures.values())]]
    for name, texts in survey.held_out.items():
        title = f"characters a token on {len(texts)} held-out texts of {name[0]} ({name[1]})"
        lines.append([title, *(f"{each.characters[name]:.2f}" for each in measures.values())])
    lines.append(["unknown bytes", *(f"{each.unknown}" for each in measures.values())])
    lines.append(["texts that do not come back as they were", *(f"{len(each.changed)}" for each in measures.values())])
    if any(each.changed for each in measures.values()):
        lines.append(["the first of them", *(each.changed[0] if each.changed else "" for each in measures.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([f"{line[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]) for line in lines)


@hydra.main(**HYDRA_VERSION_BASE, config_path="../conf", config_name="tokenizer")
def main(tree: DictConfig) -> None:
    with reporting_user_errors():
        train_tokenizer(to_schema(tree, TokenizerConfig))


if __name__ == "__main__":
    run_subcommand(main, TokenizerConfig, free=("path", "to", "tokenizer", "compare"))
