import json
from pathlib import Path

import pytest

from data.chat import ChatTemplate
from data.tokenizer import Tokenizer

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
