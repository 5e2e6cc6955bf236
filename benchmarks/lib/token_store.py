"""Token stores of any size with random tokens, for runs whose start is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BATCH_TOKENS = 1 << 20  # tokens written at once
MEAN_LOG_LENGTH = 5.3  # of the rows: the median is 200 tokens


def store_overrides(folder: Path) -> list[str]:
    """Return the overrides of a run that reads the store in `folder`."""
    path, cache = folder / "rows.jsonl", folder / "cache"
    return [
        "stage=pretrain",
        f"data.path={path}",
        f"data.cache={cache}",
        "data.max_length=512",
        "data.val_path=null",
        "train.batch_size=1",
    ]


def store_config(folder: Path) -> Any:
    from runner.config.compose import compose_config

    return compose_config(store_overrides(folder))


def write_random_store(folder: Path, size: int) -> int:
    """Write a small JSONL file and, under its cache key, a store of `size` bytes of tokens instead of its own. Return
    the number of rows.
    """
    import numpy as np

    from data.store.writer import write_store
    from data.tokenize.block import EncodedBlock, RowStats
    from data.tokenize.origin import open_tokenizer
    from runner.engine.data_pipeline import build_data_pipeline

    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    cfg = store_config(folder)
    build_data_pipeline(cfg, open_tokenizer(cfg.data, "scratch"))
    [store] = {path.parent for path in (folder / "cache").rglob("rows.bin")}
    metadata = json.loads((store / "MANIFEST.json").read_text())["metadata"]
    generator, rows = np.random.default_rng(0), 0
    with write_store(store, 1, 6399, metadata) as writer:
        while writer.tokens * 2 < size:
            lengths = np.clip(generator.lognormal(MEAN_LOG_LENGTH, 0.8, BATCH_TOKENS // 250), 2, 513).astype(np.int64)
            count, tokens = len(lengths), generator.integers(0, 6400, lengths.sum()).astype(np.int32)
            spans = np.stack([np.ones(count, np.int64), lengths], 1).astype(np.int32)
            stats = RowStats(read=count, kept=count, tokens=len(tokens), loss_tokens=len(tokens) - count)
            writer.append(
                EncodedBlock(
                    tokens,
                    lengths,
                    spans,
                    np.ones(count, np.int64),
                    np.arange(rows, rows + count),
                    np.ones(count, np.float32),
                    stats,
                )
            )
            rows += count
    return rows
