"""Files of a token store. The folder is named by the key of its content and holds, all numbers little-endian:

tokens.bin     uint16 or uint32: the ids of all sequences, concatenated
spans.bin      uint32 (P, 2): [start, stop) within its sequence of tokens with loss; (2**32 - 1, bits of a float32) is the weight of the next one, else 1
sequences.bin  uint64 (S + 1, 2): index of the first token and of the first span of each sequence; the last entry is the end
rows.bin       (N): position in the source int64, hash of the tokens uint64, weight float32, crc32 of the row with its tokens and spans uint32
MANIFEST.json  sizes of the files, crc32 of sequences.bin and rows.bin, metadata, and its own sha256
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

STORE_FORMAT = 5  # version of this layout: a store of another version is built again
STORE_MANIFEST = "MANIFEST.json"
STORE_FILES = ("tokens.bin", "spans.bin", "sequences.bin", "rows.bin")
TABLE_FILES = STORE_FILES[2:]
SPAN_DTYPE = np.dtype("<u4")
OFFSET_DTYPE = np.dtype([("token", "<u8"), ("span", "<u8")])
ROW_DTYPE = np.dtype([("position", "<i8"), ("content", "<u8"), ("weight", "<f4"), ("checksum", "<u4")])


def row_checksum(row: np.ndarray, lengths: np.ndarray, span_counts: np.ndarray, tokens: bytes | memoryview, spans: bytes | memoryview) -> int:
    """Return the crc32 of an entry of rows.bin with its sequence lengths, tokens and spans."""
    checksum = zlib.crc32(row.tobytes()[: -ROW_DTYPE["checksum"].itemsize])
    for part in (lengths.tobytes(), span_counts.tobytes(), tokens, spans):
        checksum = zlib.crc32(part, checksum)
    return checksum


def content_hash(lengths: np.ndarray, tokens: bytes | memoryview) -> int:
    """Return a 64-bit hash of the token ids of a row: equal for rows that are the same tokens, whatever their loss mask or weight."""
    return int.from_bytes(hashlib.blake2b(lengths.tobytes() + tokens, digest_size=8).digest(), "little")


def sequence_sizes(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of tokens and of spans of each sequence, int64."""
    return np.diff(offsets["token"].astype("<i8")), np.diff(offsets["span"].astype("<i8"))
