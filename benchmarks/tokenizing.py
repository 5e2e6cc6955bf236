"""Tokenizing once against tokenizing in __getitem__: python benchmarks/tokenizing.py [--path FILE ...] [--rows 20000]
[--write].

The rows of a file, repeated with a number at the end of each text, are (1) encoded into a token store: read, parsed,
encoded, written and synced; (2) encoded into padded tensors one by one as a dataset does it that tokenizes in
__getitem__, with transformers: render the template, call the tokenizer, search for the ids that begin and end an
answer. The rows of (2) are parsed and in memory before.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from lib.results import report_result, result_parser
from lib.runs import SAMPLES

TOKENIZER = SAMPLES / "tokenizer"
ROUNDS = 3
MAX_LENGTH = 512  # tokens
GETITEM_ROWS = 2000  # rows of (2) per round: each costs the same
IGNORE_INDEX = -100


def repeat_rows(path: Path, count: int, folder: Path) -> tuple[str, Path]:
    """Return the data format (chat or text) and a JSONL file of `count` rows in the format of MiniMind."""
    from data.schemas.registry import SCHEMAS, schema_of_source
    from data.sources.files import Source

    source = Source.open(path)
    try:
        data_format, schema = "chat", schema_of_source(source, "chat")
    except ValueError:
        data_format, schema = "text", schema_of_source(source, "text")
    examples = [SCHEMAS[schema].read(row, source.where(position)) for position, row in source.rows(lambda error: None)]
    repeated = folder / f"{data_format}.jsonl"
    with open(repeated, "w", encoding="utf-8") as file:
        for number in range(count):
            example, repetition = examples[number % len(examples)], number // len(examples)
            row = minimind_row(example, f" {repetition}" if repetition else "")
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return data_format, repeated


def minimind_row(example, suffix: str) -> dict:
    if hasattr(example, "text"):
        return {"text": example.text + suffix}
    turns = [{**turn, "content": turn["content"] + suffix if turn["content"] else ""} for turn in example.messages]
    return {"conversations": turns, "tools": example.tools}


class GetItemDataset:
    """A dataset that tokenizes when it is asked for a row."""

    def __init__(self, path: Path, data_format: str) -> None:
        from transformers import PreTrainedTokenizerFast

        with open(path, encoding="utf-8") as file:
            self.samples = [json.loads(line) for _, line in zip(range(GETITEM_ROWS), file, strict=False)]
        self.encode = self.encode_text if data_format == "text" else self.encode_chat
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        self.pad = self.tokenizer.pad_token_id
        self.answer_start = self.tokenizer(f"{self.tokenizer.bos_token}assistant\n", add_special_tokens=False).input_ids
        self.answer_end = self.tokenizer(f"{self.tokenizer.eos_token}\n", add_special_tokens=False).input_ids

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        import torch

        ids, labels = self.encode(self.samples[index])
        return torch.tensor(ids), torch.tensor(labels)

    def encode_text(self, sample: dict) -> tuple[list[int], list[int]]:
        ids = self.tokenizer(
            sample["text"], add_special_tokens=False, max_length=MAX_LENGTH - 2, truncation=True
        ).input_ids
        ids = [self.tokenizer.bos_token_id, *ids, self.tokenizer.eos_token_id]
        missing = MAX_LENGTH - len(ids)
        return ids + [self.pad] * missing, ids + [IGNORE_INDEX] * missing

    def encode_chat(self, sample: dict) -> tuple[list[int], list[int]]:
        text = self.tokenizer.apply_chat_template(
            sample["conversations"], tools=sample["tools"], tokenize=False, add_generation_prompt=False
        )
        ids = self.tokenizer(text).input_ids[:MAX_LENGTH]
        ids += [self.pad] * (MAX_LENGTH - len(ids))
        labels = [IGNORE_INDEX] * MAX_LENGTH
        position = 0
        while position < MAX_LENGTH:
            if ids[position : position + len(self.answer_start)] != self.answer_start:
                position += 1
                continue
            start = stop = position + len(self.answer_start)
            while stop < MAX_LENGTH and ids[stop : stop + len(self.answer_end)] != self.answer_end:
                stop += 1
            position = min(stop + len(self.answer_end), MAX_LENGTH)
            labels[start:position] = ids[start:position]
        return ids, labels


def processor_seconds() -> float:
    """Return the processor time of this process and of its finished children."""
    return sum(os.times()[:4])


def getitem_speed(dataset: GetItemDataset, workers: int) -> tuple[float, float]:
    """Return rows per second of wall-clock and of processor time; workers are those of a DataLoader, their start
    included.
    """
    import torch
    from torch.utils.data import DataLoader

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in workers; a single text uses one thread anyway
    torch.set_num_threads(1)
    started, processor, count = time.perf_counter(), processor_seconds(), 0
    if workers:
        count = sum(len(batch[0]) for batch in DataLoader(dataset, batch_size=32, num_workers=workers))  # type: ignore[arg-type]  # __len__ and __getitem__ suffice
    else:
        count = sum(dataset[index] is not None for index in range(len(dataset)))
    return count / (time.perf_counter() - started), count / (processor_seconds() - processor)


def store_speed(path: Path, data_format: str, workers: int, folder: Path) -> tuple[float, float]:
    """Return the same for the store: from starting the processes to the last fsync."""
    from data.sources.files import Source
    from data.store.cache import load_or_build
    from data.tokenize.tokenizer import Tokenizer
    from data.types import EncodingConfig

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
    schema, too_long = ("text", "split") if data_format == "text" else ("minimind chat", "truncate")
    encoding = EncodingConfig(data_format, schema, TOKENIZER, MAX_LENGTH, too_long, "assistant", "error")
    tokenizer, source = Tokenizer.load(TOKENIZER), Source.open(path)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        started, processor = time.perf_counter(), processor_seconds()
        rows = load_or_build(source, encoding, tokenizer, Path(cache), num_workers=workers).stats.read
        return rows / (time.perf_counter() - started), rows / (processor_seconds() - processor)


def table(path: Path, count: int, folder: Path) -> str:
    data_format, repeated = repeat_rows(path, count, folder)
    cores, dataset = len(os.sched_getaffinity(0)), GetItemDataset(repeated, data_format)
    getitem_speed(dataset, 0)  # warmup
    cases = {
        "in __getitem__, one process": lambda: getitem_speed(dataset, 0),
        f"in __getitem__, DataLoader with {cores} workers": lambda: getitem_speed(dataset, cores),
        "into the store, one process": lambda: store_speed(repeated, data_format, 1, folder),
        f"into the store, {cores} processes": lambda: store_speed(repeated, data_format, cores, folder),
    }
    # interleaved: other load affects all cases
    rounds = [{case: measure() for case, measure in cases.items()} for _ in range(ROUNDS)]
    lines = [
        f"{path.name}: {count:,} rows of {data_format}, {repeated.stat().st_size / 1e6:.0f} MB, max_length={MAX_LENGTH}. Median of {ROUNDS} rounds.",
        "",
        "| case | rows/s | relative to the first | rows/s of processor time | relative to the first |",
        "|---|---|---|---|---|",
    ]
    medians = {
        case: [statistics.median(values) for values in zip(*(speeds[case] for speeds in rounds), strict=True)]
        for case in cases
    }
    first_wall, first_processor = next(iter(medians.values()))
    for case, (wall, processor) in medians.items():
        lines.append(
            f"| {case} | {wall:,.0f} | {wall / first_wall:.1f} | {processor:,.0f} | {processor / first_processor:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = result_parser(__doc__)
    parser.add_argument(
        "--path",
        type=Path,
        nargs="+",
        default=[SAMPLES / "pretrain.jsonl", SAMPLES / "sft.jsonl"],
        help="files of texts or conversations",
    )
    parser.add_argument("--rows", type=int, default=20_000, help="repeat the rows of each file up to this number")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as temp:
        result = "\n\n".join(table(path, args.rows, Path(temp)) for path in args.path)
    command = (
        f"python benchmarks/tokenizing.py --rows {args.rows} --path {' '.join(path.name for path in args.path)} --write"
    )
    report_result("tokenizing", "Tokenizing once against tokenizing in __getitem__", command, result, args.write)
