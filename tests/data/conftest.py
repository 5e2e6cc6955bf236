import json
from pathlib import Path

import pytest
from template_fixtures import ChatTemplate

from data.batching.mixture import MixedRows, WeightedSource, mix_sources
from data.schemas.registry import schema_of_source
from data.sources.files import Source
from data.store.cache import load_or_build
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
    """build(data_format, path) encodes a file: `data_format` is text, chat or preference; `options` are fields of
    EncodingConfig.
    """

    def build(data_format: str, path: Path, **options) -> MixedRows:
        source = Source.open(path)
        defaults = {
            "schema": options.get("schema") or schema_of_source(source, data_format),
            "max_length": 64,
            "too_long": "split" if data_format == "text" else "truncate",
            "loss_on": "assistant",
            "on_bad_row": "error",
        }
        encoding = EncodingConfig(data_format, tokenizer=tokenizer.folder, **{**defaults, **options})
        return mix_sources(
            [[WeightedSource(source, load_or_build(source, encoding, tokenizer, tmp_path / "cache"))]], None
        )

    return build
