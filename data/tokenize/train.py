"""Trains a byte-level BPE tokenizer, writes a folder that AutoTokenizer loads, and prints how tokenizers encode
held-out text.

The text is that of the rows of any schema, as a stream. Unusable rows are counted, some rows are held out to evaluate
the tokenizer.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from common.errors import UserError, print_note, print_safely
from common.guarded_files import check_own_files
from data.config import TokenizerConfig
from data.schemas.registry import SCHEMAS
from data.sources.files import Source, open_entry
from data.tokenize.block import RowStats
from data.tokenize.chat_template import CHATML
from data.tokenize.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer
from data.types import BadRowError

# Single tokens, but text of the assistant: decoding does not skip them.
RESERVED_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + len(RESERVED_TAGS) + 256  # control tokens and one token per byte
MAX_TOKEN_BYTES = 16  # Chinese has no spaces: without a limit a frequent sentence becomes one token
MODEL_MAX_LENGTH = 32768
HOLDOUT_EVERY = 20  # one row in 20 is held out ...
HOLDOUT_MAX = 10_000_000  # ... until the held-out rows of a file have this many characters
LABEL_FIELDS = ("role", "from", "type", "id")  # their strings name the author or the kind of a message and are not text
TEXT_FIELDS = {key for schema in SCHEMAS.values() for key in schema.keys} | {"input", "history", "system", "tools"}
Texts = dict[tuple[str, str], list[tuple[str, str]]]  # (file, language) -> [(file:line, text)]


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
    # a file may be one row: it is measured, or trained on
    texts = iter_corpus(sources, cfg.max_lines, stats, held_out=0 if tokenizer else 1)
    if tokenizer:
        count = sum(1 for _ in texts)
        print(f"skipped {count} texts of {stats.rows} rows that are not held out")
    else:
        if (first := next(texts, None)) is None:
            problems = "; ".join(f"{reason}, first at {stats.first_seen[reason]}" for reason in stats.bad)
            raise UserError(f"no row has text to train on: {problems}", f"path={cfg.path}", "correct the rows")
        texts = itertools.chain([first], texts)
        tokenizer = train_bpe(texts, cfg.vocab_size, Path(str(cfg.to)))
        print_safely(f"{tokenizer.vocab_size} tokens from {stats.rows} rows in {cfg.to}")
    for reason, count in stats.bad.most_common():
        print_safely(f"left out {count}: {reason}, first at {stats.first_seen[reason]}")
    measured = {str(each.folder): measure_tokenizer(each, stats.held_out) for each in (tokenizer, other) if each}
    print_safely(report_table(measured))


@dataclass
class CorpusStats(RowStats):
    """Counts of the rows of a corpus, and its held-out texts. Complete when the corpus has been iterated."""

    rows: int = 0
    held_out: Texts = field(default_factory=dict)

    def skip(self, error: BadRowError) -> None:
        self.count_dropped("bad", error.reason, error.setting)


def iter_corpus(sources: list[Source], max_lines: int, stats: CorpusStats, held_out: int = 1) -> Iterator[str]:
    """Yield the texts of at most `max_lines` rows of each file, in order; a file that is listed twice is read twice.

    `held_out`: number of the row that is held out of each HOLDOUT_EVERY rows with text.
    """
    for number, source in enumerate(sources):
        counts = CorpusStats() if source in sources[:number] else stats  # errors of a file are counted once
        capacity, number_of_row = HOLDOUT_MAX, itertools.count()
        for position, row in itertools.islice(source.rows(counts.skip), max_lines):
            texts = [
                text
                for text in _strings({key: value for key, value in row.items() if key in TEXT_FIELDS} or row)
                if text.strip()
            ]
            where = source.where(position)
            if not texts:
                counts.skip(BadRowError("a row without text", "a row without text", where, "delete the row"))
            elif next(number_of_row) % HOLDOUT_EVERY == held_out and capacity > 0:
                capacity -= sum(map(len, texts))
                for text in texts:
                    counts.held_out.setdefault((source.path.name, _language(text)), []).append((where, text))
            else:
                stats.rows += 1
                yield from texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in LABEL_FIELDS:
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _language(text: str) -> str:
    """Return "zh" if at least one character in five is Han, else "en": a rough split for the report."""
    han = sum("\u4e00" <= character <= "\u9fff" for character in text)
    return "zh" if 5 * han >= len(text) else "en"


def measure_tokenizer(tokenizer: Tokenizer, held_out: Texts) -> dict[str, str]:
    """Return what the table of `report_table` says of a tokenizer, by the title of the line."""
    measured, characters = {"vocabulary": f"{tokenizer.vocab_size}"}, Counter[str]()
    not_restored: list[str] = []  # file:line of texts that decoding does not restore exactly
    for (file, language), texts in held_out.items():
        encoded = tokenizer.encode_batch([text for _, text in texts])
        rate = sum(len(text) for _, text in texts) / max(1, sum(map(len, encoded)))
        measured[f"characters per token on {len(texts)} held-out texts of {file} ({language})"] = f"{rate:.2f}"
        not_restored += [
            where
            for (where, text), ids in zip(texts, encoded, strict=True)
            if tokenizer.decode(ids, skip_special=False) != text
        ]
        for _, text in texts:
            characters.update(text)
    return measured | {
        "unknown bytes": f"{_count_unknown_bytes(tokenizer, characters)}",
        "texts that decoding does not restore": f"{len(not_restored)}",
        "the first of them": "".join(not_restored[:1]),
    }


def _count_unknown_bytes(tokenizer: Tokenizer, characters: Counter[str]) -> int:
    """Return the number of bytes of the texts without a token, 0 for a byte-level tokenizer.

    Encodes and decodes each character between two letters: some tokenizers drop a space at the end of a text.
    """
    decoded = (
        tokenizer.decode(ids, skip_special=False)
        for ids in tokenizer.encode_batch([f"x{character}x" for character in characters])
    )
    return sum(
        count * len(character.encode())
        for (character, count), text in zip(characters.items(), decoded, strict=True)
        if character not in text
    )


def report_table(reports: dict[str, dict[str, str]]) -> str:
    """Return a text table with a column per tokenizer, from what `measure_tokenizer` returns by the tokenizer's name."""
    columns = list(reports.values())
    lines = [["", *reports], *([title, *(column[title] for column in columns)] for title in columns[0])]
    lines = [line for line in lines if any(line[1:])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [f"{line[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train on `texts` (read once, as a stream) and write tokenizer.json, tokenizer_config.json and
    chat_template.jinja.
    """
    check_own_files(folder, ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    if (folder / "config.json").exists() or (folder / "tokenizer.json").exists():
        raise UserError(
            "the folder has a model or a tokenizer, which would be replaced", f"to={folder}", "a new folder"
        )
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
    _write_tokenizer(folder, engine)
    return Tokenizer.load(folder)


def _write_tokenizer(folder: Path, engine: Engine) -> None:
    chat_template = CHATML.read_text(encoding="utf-8")
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
