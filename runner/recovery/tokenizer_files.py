"""Is the run's copy of its tokenizer whole? Otherwise files with the checksums of the checkpoint are copied from where
it came from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.filesystem import make_dirs, read_bounded, write_atomic_file
from common.guarded_files import GENERATION_CONFIG, MAX_TOKENIZER_BYTES, keep_damaged, read_source_file
from data.tokenize.origin import RUN_TOKENIZER, generation_config_of_run
from runner.recovery.evidence import CheckpointState
from runner.recovery.finding import Problem, Repair, Severity


def check_tokenizer_files(evidence: CheckpointState) -> Iterator[Repair]:
    """Yield the findings about the files of `tokenizer/`."""
    folder, source = evidence.folder, evidence.record["fields"].get("tokenizer_source")
    sources = [*([Path(source)] if isinstance(source, str) else []), folder / "model"]
    for file, checksum in evidence.record["tokenizer"].items():
        name, state = f"{RUN_TOKENIZER}/{file}", _damage_of(folder / RUN_TOKENIZER / file, checksum)
        found = (
            next((content for each in sources if (content := _read_if(each / file, checksum)) is not None), None)
            if state
            else None
        )
        if state and found is None and file == GENERATION_CONFIG:
            found = _derived_settings(evidence.record["fields"], checksum)
        if state is None:
            yield Repair(Problem(name, Severity.SOUND, "whole"))
        elif found is None:
            fix = f"put a file of sha256 {checksum} there: no copy of it is in {' or '.join(map(str, sources))}"
            yield Repair(Problem(name, Severity.BLOCKING, state, fix))
        else:
            action = "copied again from the tokenizer that it came from"
            yield Repair(Problem(name, Severity.DAMAGED, state, action, action), partial(_restore, folder, name, found))


def _derived_settings(fields: dict[str, Any], checksum: str) -> bytes | None:
    """Return generation_config.json as the run derived it when it began, if it has this sha256."""
    source, init_from = fields.get("tokenizer_source"), fields.get("init_from")
    if not isinstance(source, str) or not isinstance(init_from, str):
        return None
    with suppress(OSError, UserError, ValueError):
        content = generation_config_of_run(Path(source), init_from)
        return content if content is not None and hashlib.sha256(content).hexdigest() == checksum else None
    return None


def _damage_of(path: Path, checksum: str) -> str | None:
    try:
        return (
            None
            if hashlib.sha256(read_bounded(path, MAX_TOKENIZER_BYTES)).hexdigest() == checksum
            else "not the file that the checkpoint was trained with"
        )
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _read_if(path: Path, checksum: str) -> bytes | None:
    """Return the content of the file if it has this sha256."""
    try:
        content = read_source_file(path, MAX_TOKENIZER_BYTES)
    except (OSError, UserError):
        return None
    return content if hashlib.sha256(content).hexdigest() == checksum else None


def _restore(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    if path.is_file():
        keep_damaged(folder, name, read_bounded(path, MAX_TOKENIZER_BYTES))
    make_dirs(path.parent)
    write_atomic_file(path, content)
