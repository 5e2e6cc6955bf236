import json
from pathlib import Path

import pytest

from data.batching.mixture import MixedRows, WeightedSource, mix_sources
from data.sources.files import Source
from data.store.cache import load_or_build
from data.tokenize.chat_template import ChatTemplate
from data.tokenize.encoder import schema_of_source
from data.tokenize.tokenizer import Tokenizer
from data.types import EncodingConfig

SHIPPED = Path(__file__).parents[2] / "data" / "samples" / "tokenizer"


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.load(SHIPPED)


@pytest.fixture(scope="session")
def template(tokenizer):
    return ChatTemplate(tokenizer)


@pytest.fixture
def write(tmp_path):
    """write(rows) puts objects as JSONL, or bytes as they are, into a file and returns its path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        content = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def build(tokenizer, tmp_path):
    """build(rows, path) is what a file becomes: `rows` is text, chat or preference; `options` are those of a Recipe."""

    def build(rows: str, path: Path, **options) -> MixedRows:
        plain = {"max_length": 64, "too_long": "split" if rows == "text" else "truncate", "train_on": "assistant", "on_bad_row": "error"}
        source = Source.open(path)
        recipe = EncodingConfig(rows=rows, tokenizer=tokenizer.folder, **{"shape": options.get("shape") or schema_of_source(source, rows), **plain, **options})
        return mix_sources([[WeightedSource(source, load_or_build(source, recipe, tokenizer, tmp_path / "cache"))]], None)

    return build
