"""Tokenising once against tokenising in __getitem__: python benchmarks/tokenise.py --path rows.jsonl [--rows 20000] [--write].

The rows of the file, repeated with a number at the end of every text until there are enough, are (1) made into a token store: read, parsed,
encoded, written and synced; (2) turned into padded tensors one at a time as a data set that tokenises in __getitem__ does it, with transformers:
a rendered template, a call of the tokenizer, a search for the ids that begin and end an answer. (2) has its rows parsed and in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lib.results import tell

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

TOKENIZER = ROOT / "data" / "samples" / "tokenizer"
ROUNDS = 3
MAX_LENGTH = 512
IN_GETITEM = 2000  # rows that (2) does a round: each costs the same
KINDS = {"chat": "minimind chat", "text": "text"}


def repeated(path: Path, count: int, folder: Path) -> tuple[str, Path]:
    """(text | chat, a JSONL file of `count` rows in MiniMind's shapes), all of them different as far as the file's are."""
    from data.schemas.schemas import SCHEMAS
    from data.sources.files import Source
    from data.tokenize.encoder import schema_of_source

    source = Source.open(path)
    rows, shape = next(found for found in (_shape(source, rows, schema_of_source) for rows in KINDS) if found)
    items = [SCHEMAS[shape].read(row, source.where(place)) for place, row in source.rows(lambda error: None)]
    to = folder / f"{rows}.jsonl"
    with open(to, "w", encoding="utf-8") as file:
        for number in range(count):
            item, copy = items[number % len(items)], number // len(items)
            file.write(json.dumps(_row(item, f" {copy}" if copy else ""), ensure_ascii=False) + "\n")
    return rows, to


def _shape(source, rows: str, shape_of) -> tuple[str, str] | None:
    try:
        return rows, shape_of(source, rows)
    except ValueError:
        return None


def _row(item, end: str) -> dict:
    from data.schemas.schemas import TextExample

    if isinstance(item, TextExample):
        return {"text": item.text + end}
    turns = [{**turn, "content": turn["content"] + end if turn["content"] else ""} for turn in item.messages]
    return {"conversations": turns, "tools": item.tools}


class InGetItem:
    """A data set that tokenises when it is asked for a row."""

    def __init__(self, path: Path, rows: str) -> None:
        from transformers import PreTrainedTokenizerFast

        with open(path, encoding="utf-8") as file:
            self.samples = [json.loads(line) for _, line in zip(range(IN_GETITEM), file, strict=False)]
        self.make = self.text if rows == "text" else self.chat
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        self.pad = self.tokenizer.pad_token_id
        self.begin = self.tokenizer(f"{self.tokenizer.bos_token}assistant\n", add_special_tokens=False).input_ids
        self.end = self.tokenizer(f"{self.tokenizer.eos_token}\n", add_special_tokens=False).input_ids

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        import torch

        ids, labels = self.make(self.samples[index])
        return torch.tensor(ids), torch.tensor(labels)

    def text(self, sample: dict) -> tuple[list[int], list[int]]:
        ids = self.tokenizer(sample["text"], add_special_tokens=False, max_length=MAX_LENGTH - 2, truncation=True).input_ids
        ids = [self.tokenizer.bos_token_id, *ids, self.tokenizer.eos_token_id]
        missing = MAX_LENGTH - len(ids)
        return ids + [self.pad] * missing, ids + [-100] * missing

    def chat(self, sample: dict) -> tuple[list[int], list[int]]:
        words = self.tokenizer.apply_chat_template(sample["conversations"], tools=sample["tools"], tokenize=False, add_generation_prompt=False)
        ids = self.tokenizer(words).input_ids[:MAX_LENGTH]
        ids += [self.pad] * (MAX_LENGTH - len(ids))
        labels = [-100] * MAX_LENGTH
        at = 0
        while at < MAX_LENGTH:
            if ids[at : at + len(self.begin)] != self.begin:
                at += 1
                continue
            start = stop = at + len(self.begin)
            while stop < MAX_LENGTH and ids[stop : stop + len(self.end)] != self.end:
                stop += 1
            stop = min(stop + len(self.end), MAX_LENGTH)
            labels[start:stop] = ids[start:stop]
            at = stop
        return ids, labels


def cpu() -> float:
    """Seconds of processor time so far, with that of processes that have ended."""
    return sum(os.times()[:4])


def in_getitem(samples: InGetItem, workers: int) -> tuple[float, float]:
    """Rows a second, and rows a second of processor time; with workers as torch's DataLoader runs them, with their start."""
    import torch
    from torch.utils.data import DataLoader

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in workers; a single text is one thread's work anyway
    torch.set_num_threads(1)
    began, busy, count = time.perf_counter(), cpu(), 0
    if workers:
        count = sum(len(batch[0]) for batch in DataLoader(samples, batch_size=32, num_workers=workers))  # type: ignore[arg-type]  # no Dataset: __len__ and __getitem__ serve
    else:
        count = sum(samples[index] is not None for index in range(len(samples)))
    return count / (time.perf_counter() - began), count / (cpu() - busy)


def in_store(path: Path, rows: str, workers: int, folder: Path) -> tuple[float, float]:
    """The same of building the store, with everything from starting the processes to the last fsync."""
    from data.sources.files import Source
    from data.store.cache import load_or_build
    from data.tokenize.tokenizer import Tokenizer
    from data.types import EncodingConfig

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is a core; so is a single one
    recipe = EncodingConfig(rows, KINDS[rows], TOKENIZER, MAX_LENGTH, "split" if rows == "text" else "truncate", "assistant", "error")
    tokenizer, source = Tokenizer.load(TOKENIZER), Source.open(path)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        began, busy = time.perf_counter(), cpu()
        read = load_or_build(source, recipe, tokenizer, Path(cache), workers=workers).tally.read
        return read / (time.perf_counter() - began), read / (cpu() - busy)


def table(path: Path, count: int, folder: Path) -> str:
    rows, made = repeated(path, count, folder)
    cores, samples = len(os.sched_getaffinity(0)), InGetItem(made, rows)
    in_getitem(samples, 0)  # warms up
    ways = {
        "in __getitem__, one process": lambda: in_getitem(samples, 0),
        f"in __getitem__, DataLoader of {cores} workers": lambda: in_getitem(samples, cores),
        "into the store, one process": lambda: in_store(made, rows, 1, folder),
        f"into the store, {cores} processes": lambda: in_store(made, rows, cores, folder),
    }
    told = [{way: measure() for way, measure in ways.items()} for _ in range(ROUNDS)]  # interleaved: a busy machine disturbs all alike
    lines = [
        f"{path.name}: {count:,} rows of {rows}, {made.stat().st_size / 1e6:.0f} MB, max_length={MAX_LENGTH}. Median of {ROUNDS} rounds.",
        "",
        "| | rows/s | times the first | rows/s of processor time | times the first |",
        "|---|---|---|---|---|",
    ]
    first = None
    for way in ways:
        wall, busy = (statistics.median(values) for values in zip(*(found[way] for found in told), strict=True))
        first = first or (wall, busy)
        lines.append(f"| {way} | {wall:,.0f} | {wall / first[0]:.1f} | {busy:,.0f} | {busy / first[1]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, nargs="+", required=True, help="files of texts or conversations")
    parser.add_argument("--rows", type=int, default=20_000, help="repeat each file's rows up to so many")
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/results/")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenise-") as place:
        found = "\n\n".join(table(path, words.rows, Path(place)) for path in words.path)
    command = f"python benchmarks/tokenise.py --rows {words.rows} --path {' '.join(path.name for path in words.path)} --write"
    tell("tokenise", "Tokenising once against tokenising in __getitem__", command, found, words.write)
