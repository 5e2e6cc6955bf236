"""Process, git commit and library versions of a run. Nothing here raises; what is unknown is None."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from common.paths import REPO_ROOT

RECORDED_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "hydra-core", "omegaconf", "swanlab")


def process_id() -> dict[str, Any]:
    """Return what identifies this process, also after its pid has been reused."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "start_ticks": start_ticks(os.getpid())}


def is_alive(process: dict[str, Any]) -> bool:
    """Return whether the process that `process_id` described is alive. Of a process on another host nothing is known: True."""
    if process.get("host") != socket.gethostname():
        return True
    return process.get("boot_id") == boot_id() and process.get("start_ticks") == start_ticks(process.get("pid"))


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def start_ticks(pid: Any) -> int | None:
    """Return when the process started (clock ticks since boot), None if there is no such process or no /proc."""
    try:
        return int(Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, TypeError, IndexError):
        return None


def git_state(root: Path = REPO_ROOT) -> dict[str, str | None]:
    """Return the commit of this checkout, and the sha256 of the difference of tracked files to it (None: there is none)."""
    lines = (_git(root, "rev-parse", "--show-toplevel", "HEAD") or b"").decode("utf-8", "replace").splitlines()
    if len(lines) != 2 or Path(lines[0]).resolve() != root.resolve():  # no repository, or installed inside of another one
        return {"commit": None, "dirty": None}
    changes = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    return {"commit": lines[1], "dirty": hashlib.sha256(changes).hexdigest() if changes else None}


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
