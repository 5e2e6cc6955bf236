"""Exit codes of every command: part of the contract with the user's scripts."""

from __future__ import annotations

OK, FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 75
PEER_LOST = 69  # a rank exits with it when another rank died; read by its launcher, never by the user
INTERRUPTED_BY_USER = 130  # 128 + SIGINT: Ctrl-C before training has begun, or in a command that saves nothing
INTERRUPTED_MESSAGE = "interrupted"
