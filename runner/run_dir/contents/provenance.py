"""Process, git commit and library versions of a run, and the record of its attempts. Nothing here raises; what is unknown is None."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from common.paths import REPO_ROOT

RECORDED_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "hydra-core", "omegaconf", "swanlab")
MAX_ATTEMPTS = 200  # newest attempts that run.json keeps
RECORDED_AT_THE_END = ("outcome", "error", "ended", "step")  # fields of run.json that its newest attempt gets, too
GIT_SECONDS = 1.0  # that a run waits for git after everything else is built


def git_state(root: Path = REPO_ROOT) -> dict[str, str | None]:
    """Return the commit of this checkout, and the sha256 of the difference of tracked files to it (None: there is none)."""
    lines = (_git(root, "rev-parse", "--show-toplevel", "HEAD") or b"").decode("utf-8", "replace").splitlines()
    if len(lines) != 2 or Path(lines[0]).resolve() != root.resolve():  # no repository, or installed inside of another one
        return {"commit": None, "dirty": None}
    changes = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    return {"commit": lines[1], "dirty": hashlib.sha256(changes).hexdigest() if changes else None}


class GitReader:
    """`git_state`, read by a thread: in a large repository git takes seconds."""

    def __init__(self) -> None:
        self._state: dict[str, str | None] = {"commit": None, "dirty": None}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self._state = git_state()

    def result(self, seconds: float = GIT_SECONDS) -> dict[str, str | None]:
        """Return `git_state`, unknown if git does not answer within `seconds` from now."""
        self._thread.join(seconds)
        return self._state


def begin_attempt(fields: Mapping[str, Any], attempt: int, started: str) -> dict[str, Any]:
    """Return the fields of run.json, whose content is `fields`, that one more attempt changes. Its facts are added by `describe_attempt`."""
    changed = {"attempt": attempt, "started": started, "versions": library_versions()}
    return {**changed, "attempts": [*_attempts(fields), changed][-MAX_ATTEMPTS:]}


def describe_attempt(fields: Mapping[str, Any], **facts: Any) -> list[dict[str, Any]]:
    """Return the `attempts` of run.json with `facts` about the newest one."""
    attempts = _attempts(fields)
    return [*attempts[:-1], {**attempts[-1], **facts}] if attempts else []


def _attempts(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    attempts = fields.get("attempts")
    return [attempt for attempt in attempts if isinstance(attempt, dict)] if isinstance(attempts, list) else []


def merge_reasons(fields: Mapping[str, Any], added: list[str]) -> list[str]:
    """Return `inexact_because` of run.json with the reasons of one more resume: an exact one does not make up for them."""
    before = fields.get("inexact_because")
    return [*dict.fromkeys([*(before if isinstance(before, list) else []), *added])]


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries, without importing them."""
    versions = {"python": platform.python_version()}
    for name in RECORDED_LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], check=False, capture_output=True, timeout=5, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout if result.returncode == 0 else None
