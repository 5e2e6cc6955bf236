"""Train a tokenizer: `python runner/tokenizer.py path=[text.jsonl,chats.jsonl] to=my_tokenizer vocab_size=6400`."""
import os
import sys

if not __package__:  # run by path: Python put runner/ first on the path, the repo root belongs there
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf


def train_tokenizer(paths: list[Path], vocab_size: int, folder: Path, max_lines: int) -> None:
    """Train on the rows of `paths`, write `folder`, and say what was left out and how well held-out rows are cut."""
    from data.chat import CHATML
    from data.corpus import Survey, corpus
    from data.tokenizer import train_bpe

    survey = Survey()
    tokenizer = train_bpe(corpus(paths, max_lines, survey), vocab_size, folder, CHATML.read_text(encoding="utf-8"))
    print(f"{tokenizer.vocab_size} words from {survey.rows} rows in {folder}")
    for reason, count in survey.bad.most_common():
        print(f"left out {count}: {reason}, first at {survey.first[reason]}")
    for (name, language), texts in survey.held_out.items():
        ids = sum(map(len, tokenizer.encode_batch(texts)))
        print(f"{sum(map(len, texts)) / ids:.2f} characters a token on {len(texts)} held-out texts of {name} ({language})")


@hydra.main(version_base="1.3", config_path="../conf", config_name="tokenizer")
def main(cfg: DictConfig) -> None:
    try:
        for word in sorted(OmegaConf.missing_keys(cfg)):
            raise ValueError("a word is missing", word, __doc__ or "")
        paths = [cfg.path] if isinstance(cfg.path, str) else cfg.path
        train_tokenizer([Path(path) for path in paths], cfg.vocab_size, Path(cfg.to), cfg.max_lines)
    except ValueError as refusal:
        print(*refusal.args, sep="\n", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
