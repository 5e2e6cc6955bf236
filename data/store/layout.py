"""The files of a token store: a folder, named by its key, holds these; all numbers are little-endian:

tokens.bin     uint16 or uint32: the ids of all sequences, one after the other
spans.bin      uint32 (P, 2): [start, stop) within its sequence of tokens that carry loss
sequences.bin  uint64 (S + 1, 2): the first token and the first span of each sequence, and where the last one ends
rows.bin       (N): place int64, weight float32, crc32 uint32 of the row and all that belongs to it
MANIFEST.json  what the others hold, the crc32 of the two tables, and the sha256 of itself
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import numpy as np

STORE_FORMAT = 2  # of these files: raise it, and every store is built again
STORE_MANIFEST = "MANIFEST.json"
STORE_FILES = ("tokens.bin", "spans.bin", "sequences.bin", "rows.bin")
TABLE_FILES = STORE_FILES[2:]
SPAN_DTYPE = np.dtype("<u4")
OFFSET_DTYPE = np.dtype([("token", "<u8"), ("span", "<u8")])
ROW_DTYPE = np.dtype([("place", "<i8"), ("weight", "<f4"), ("checksum", "<u4")])


def checksum_of(row: np.ndarray, lengths: np.ndarray, span_counts: np.ndarray, tokens: bytes | memoryview, spans: bytes | memoryview) -> int:
    """Of a row and all that belongs to it: also of where it comes from, its weight, and where its sequences part."""
    checksum = zlib.crc32(row.tobytes()[: -ROW_DTYPE["checksum"].itemsize])
    for part in (lengths.tobytes(), span_counts.tobytes(), tokens, spans):
        checksum = zlib.crc32(part, checksum)
    return checksum


def file_sizes(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and spans of each sequence, int64."""
    return np.diff(begins["token"].astype("<i8")), np.diff(begins["span"].astype("<i8"))


def dump_manifest(manifest: dict[str, Any]) -> bytes:
    return json.dumps({**manifest, "sha256": _digest(manifest)}, ensure_ascii=False, indent=1).encode("utf-8", "surrogatepass")  # a path may be any bytes


def load_manifest(raw: bytes) -> dict[str, Any]:
    manifest = json.loads(raw)
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest(manifest):
        raise ValueError("the manifest is damaged")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
