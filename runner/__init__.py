"""The commands (`runner/*.py`) and their parts, a folder each. A command may import all folders; no folder imports a command."""

import sys

if sys.platform == "win32":
    print(
        "error: this needs the signals and file locks of Linux or macOS; use WSL: docs/guide/windows.md",
        file=sys.stderr,
    )
    sys.exit(2)
