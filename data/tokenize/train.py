"""Trains a byte-level BPE tokenizer, writes a folder that AutoTokenizer loads, and prints how tokenizers encode
held-out text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from common.errors import UserError, print_note, print_safely
from common.guarded_files import check_own_files
from data.sources.files import open_entry
from data.tokenize.chat_template import CHATML
from data.tokenize.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer
from data.tokenize.tokenizer_corpus import CorpusStats, TokenizerConfig, TokenizerReport, iter_corpus, measure_tokenizer

# Single tokens, but text of the assistant: decoding does not skip them.
RESERVED_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(RESERVED_TAGS) + 256  # control tokens and one token per byte
MAX_TOKEN_BYTES = 16  # Chinese has no spaces: without a limit a frequent sentence becomes one token
MODEL_MAX_LENGTH = 32768


def train_tokenizer(cfg: TokenizerConfig) -> None:
    """Train a tokenizer on the rows of `cfg.path` and write it to `cfg.to`, or load `cfg.tokenizer`; print how it
    encodes held-out rows.
    """
    # checks all files before the first one is read
    entries = [cfg.path] if isinstance(cfg.path, str) else cfg.path
    sources = [source for entry in entries for source in open_entry(entry)]
    for source in sources:
        if source.detected:
            print_note(f"{source.name}: {source.detected}")
    other = Tokenizer.load(Path(cfg.compare)) if cfg.compare else None
    tokenizer = Tokenizer.load(Path(cfg.tokenizer)) if cfg.tokenizer else None
    for line in (line for each in (tokenizer, other) if each for line in each.dropout_note):
        print_note(line)
    stats = CorpusStats()
    texts = iter_corpus(sources, cfg.max_lines, stats)
    if tokenizer:
        count = sum(1 for _ in texts)
        print(f"skipped {count} texts of {stats.rows} rows that are not held out")
    else:
        tokenizer = train_bpe(texts, cfg.vocab_size, Path(str(cfg.to)), CHATML.read_text(encoding="utf-8"))
        print_safely(f"{tokenizer.vocab_size} tokens from {stats.rows} rows in {cfg.to}")
    for reason, count in stats.bad.most_common():
        print_safely(f"left out {count}: {reason}, first at {stats.first_seen[reason]}")
    print_safely(
        report_table(
            {str(each.folder): measure_tokenizer(each, stats.held_out) for each in (tokenizer, other) if each}, stats
        )
    )


def report_table(reports: dict[str, TokenizerReport], stats: CorpusStats) -> str:
    """Return a text table with a column per tokenizer."""
    lines = [["", *reports], ["vocabulary", *(f"{report.vocab_size}" for report in reports.values())]]
    for name, texts in stats.held_out.items():
        title = f"characters per token on {len(texts)} held-out texts of {name[0]} ({name[1]})"
        lines.append([title, *(f"{report.chars_per_token[name]:.2f}" for report in reports.values())])
    lines.append(["unknown bytes", *(f"{report.unknown_bytes}" for report in reports.values())])
    lines.append(
        ["texts that decoding does not restore", *(f"{len(report.not_restored)}" for report in reports.values())]
    )
    if any(report.not_restored for report in reports.values()):
        lines.append(
            [
                "the first of them",
                *(report.not_restored[0] if report.not_restored else "" for report in reports.values()),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [f"{line[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, chat_template: str) -> Tokenizer:
    """Train on `texts` (read once, as a stream) and write tokenizer.json, tokenizer_config.json and
    chat_template.jinja.
    """
    check_own_files(folder, ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    if vocab_size < MIN_VOCAB_SIZE:
        message = f"vocab_size must be at least {MIN_VOCAB_SIZE} (control tokens and 256 bytes), got {vocab_size}"
        raise UserError(message, f"vocab_size={vocab_size}", "e.g. vocab_size=6400")
    engine = Engine(models.BPE())
    # One token per digit: how a number is encoded does not depend on the numbers in the training text.
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[
            AddedToken(token, normalized=False, special=token in SPECIAL_TOKENS)
            for token in SPECIAL_TOKENS + RESERVED_TAGS
        ],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    _write_tokenizer(folder, engine, chat_template)
    return Tokenizer.load(folder)


def _write_tokenizer(folder: Path, engine: Engine, chat_template: str) -> None:
    stored = json.loads(engine.to_str())
    for token in stored["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS  # the trainer marks every reserved token special
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to transformers 4 and 5
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": PAD,
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(stored, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
