"""`incidents.jsonl` of a run directory: one record per failure of a supervised training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import print_note
from common.filesystem import write_all
from common.guarded_files import open_append

INCIDENTS_FILE = "incidents.jsonl"


def append_incident(folder: Path, record: dict[str, Any]) -> None:
    """Append a record. A disk that refuses it does not stop the supervisor."""
    try:
        with open_append(folder / INCIDENTS_FILE) as file:
            write_all(file.fileno(), json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    except OSError as error:
        print_note(f"warning: {INCIDENTS_FILE} cannot be written: {error.strerror or error}")
