"""Regular expressions that another may have written: matched in a process with limits, which ends them if they take too
long.

`re` searches by trial: `(a+)+b` takes time that doubles with each letter. The process is this file, started by its
path; it needs the standard library only.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

MATCH_SECONDS = 3  # processor time for all patterns
MATCH_MEMORY = 1 << 28  # bytes of the process
MAX_MATCHED_CHARACTERS = 1000
OWN_LIMIT = 30  # seconds until a process that gets no processor time is given up


def match_patterns(patterns: list[str], texts: list[str]) -> list[list[bool]]:
    """Return for each pattern which texts it matches as a whole.

    Raises ValueError, naming the pattern, for one that is invalid or beyond the limits.
    """
    if too_long := next((pattern for pattern in patterns if len(pattern) > MAX_MATCHED_CHARACTERS), None):
        raise ValueError(
            f"{too_long[:60]}... has {len(too_long):,} characters, at most {MAX_MATCHED_CHARACTERS:,} are allowed"
        )
    request = json.dumps([patterns, texts]).encode()
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(MATCH_SECONDS)],
            input=request,
            capture_output=True,
            timeout=OWN_LIMIT,
            process_group=0,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{_shortened(patterns)}: no result after {OWN_LIMIT} seconds") from error
    if ended.returncode:
        problem = f"it takes more than {MATCH_SECONDS} seconds or {MATCH_MEMORY >> 20} MiB for {len(texts):,} names; e.g. a repetition inside of a repetition does"
        lines = ended.stderr.decode(errors="replace").splitlines()
        raise ValueError(lines[-1] if ended.returncode == 1 and lines else f"{_shortened(patterns)}: {problem}")
    matched: list[list[bool]] = json.loads(ended.stdout)
    return matched


def _shortened(patterns: list[str]) -> str:
    return ", ".join(pattern[:60] for pattern in patterns[:3])


def match_request() -> int:
    """Answer the request of `match_patterns` on standard input."""
    seconds = int(sys.argv[1])
    patterns, texts = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MATCH_MEMORY, MATCH_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            print(f"{pattern[:60]} is no regular expression: {error}".replace("\n", " "), file=sys.stderr)
            return 1
    json.dump([[pattern.fullmatch(text) is not None for text in texts] for pattern in compiled], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(match_request())
