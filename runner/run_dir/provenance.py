"""Where a run comes from: the process, the code and the libraries. Nothing here can fail a run; what is unknown is None."""

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
    """This process, told apart from any later one that is given its number."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id(), "start_ticks": start_ticks(os.getpid())}


def is_alive(stated: dict[str, Any]) -> bool:
    """Whether the process that `process()` described is still there. Of one on another host nothing is known: True."""
    if stated.get("host") != socket.gethostname():
        return True
    return stated.get("boot_id") == boot_id() and stated.get("start_ticks") == start_ticks(stated.get("pid"))


def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def start_ticks(pid: Any) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none, or no /proc."""
    try:
        return int(Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, TypeError, IndexError):
        return None


def git_state(root: Path = REPO_ROOT) -> dict[str, str | None]:
    """The commit this program stands at, and a sha256 of what tracked files differ from it (None: clean)."""
    words = (_git(root, "rev-parse", "--show-toplevel", "HEAD") or b"").decode("utf-8", "replace").splitlines()
    if len(words) != 2 or Path(words[0]).resolve() != root.resolve():  # installed into somebody else's repository, or in none
        return {"commit": None, "dirty": None}
    changes = _git(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    return {"commit": words[1], "dirty": hashlib.sha256(changes).hexdigest() if changes else None}


def library_versions() -> dict[str, str]:
    """Python and the libraries installed, without importing them."""
    found = {"python": platform.python_version()}
    for name in RECORDED_LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], check=False, capture_output=True, timeout=5, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"})
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
