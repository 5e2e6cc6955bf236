"""`python -m lm_runner train stage=sft precision=bf16`: any command of the runner by its name."""

from __future__ import annotations

import sys

from lm_runner import COMMANDS, run_command


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m lm_runner {{{','.join(COMMANDS)}}} [key=value ...]", file=sys.stderr)
        sys.exit(2)
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory: ranks and jobs of a sweep do not import from it
    run_command(sys.argv.pop(1))


if __name__ == "__main__":
    main()
