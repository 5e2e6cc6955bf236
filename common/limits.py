"""Limits on what files and clients of another can make this program do: JSON and YAML, memory, regular expressions,
connections.

Imports the standard library, and yaml inside functions. The size of a file is limited where it is read
(common/filesystem.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

MAX_NESTING = 100  # levels of lists and objects
MAX_JSON_VALUES = 4_000_000  # commas and opening brackets; the largest tokenizer.json in use has 1.5 million
MAX_YAML_VALUES = 20_000  # a saved config has 300
MAX_DIGITS = 100  # of a whole number; larger ones are no finite float, and PyYAML needs quadratic time for `1:1:1:...`
NUMBER = re.compile(r"[-+.\d][-+.:_\w]*")
TOO_DEEP = f"nested deeper than {MAX_NESTING} levels"
MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
CGROUPS_OF_PROCESS, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # files of cgroup 2, 1
MATCH_SECONDS = 3  # processor time for all patterns
MATCH_MEMORY = 1 << 28  # bytes of the process
MAX_MATCHED_CHARACTERS = 1000
MAX_SCHEMA_STEPS = 200_000  # of llguidance with a JSON schema: about a second
OWN_LIMIT = 30  # seconds until a process that gets no processor time is given up
# For the headers of a request, from the first byte, or from the connection if none comes; no byte moves the deadline.
# Connections that send them slowly, or none, would take all places.
HEADER_SECONDS = 20


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for one that is invalid or beyond the limits: also for an object with a name twice, NaN, and a
    number that is infinite as a float.
    """
    check_json_size(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=unique_names,
            parse_float=_finite_float,
            parse_int=_bounded_int,
            parse_constant=_refuse_constant,
        )
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    check_nesting(value)
    return value


def parse_record(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line of a log; {} if it is none."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def check_json_size(text: bytes | str) -> None:
    """Raise ValueError if a JSON text has more than MAX_JSON_VALUES values.

    Commas and brackets in strings count, too.
    """
    symbols: Any = b",[{" if isinstance(text, bytes) else ",[{"
    count = sum(map(text.count, symbols))
    if count > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES:,} values")


def check_nesting(value: Any) -> None:
    """Raise ValueError if a JSON value is nested deeper than MAX_NESTING levels."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise ValueError(TOO_DEEP)
        level = [
            item
            for parent in level
            for item in (parent.values() if type(parent) is dict else parent)
            if type(item) in (dict, list)
        ]


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs. Raises ValueError for a name that is given twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name[:100]!r} is given twice in one object")
    return value


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} characters")
    return int(text)


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document.

    Raises ValueError for one that is invalid or beyond the limits: also for an anchor, an alias, a tag, a mapping with
    a key twice, NaN and infinity.
    """
    import yaml

    try:
        _check_yaml(text)
        loader = _yaml_loader()(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    # TypeError: a list as a key; AttributeError: `!!` forms
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(str(error) or TOO_DEEP) from error
    return value


def _check_yaml(text: str) -> None:
    """Raise ValueError for what would take much time or memory to construct.

    Reads events one by one, and builds nothing.
    """
    import yaml

    depth = count = 0
    for event in yaml.parse(text, Loader=_yaml_loader()):
        count += 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_NESTING:
            raise ValueError(TOO_DEEP)
        if count > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES:,} values")
        if getattr(event, "anchor", None) is not None:  # of an AliasEvent, too
            raise ValueError("YAML anchors and aliases are not allowed")  # a few lines of them expand to gigabytes
        if (tag := getattr(event, "tag", None)) is not None:
            raise ValueError(f"YAML tags are not allowed, got {tag[:40]}")
        if (
            isinstance(event, yaml.ScalarEvent)
            and not event.style
            and len(event.value) > MAX_DIGITS
            and NUMBER.fullmatch(event.value)
        ):
            raise ValueError(f"a number of more than {MAX_DIGITS} characters")


@cache
def _yaml_loader() -> Any:
    """Return a class of loaders with the types of SafeLoader."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # PyYAML may be built without libyaml
        """Refuses a key that is given twice, and numbers that are not finite."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if len(set(names)) < len(names):
                raise ValueError(f"a key is given twice: {next(name for name in names if names.count(name) > 1)[:100]}")
            return super().construct_mapping(node, deep)

        def construct_yaml_float(self, node: Any) -> float:
            number = super().construct_yaml_float(node)
            if not math.isfinite(number):
                raise ValueError(f"{node.value} is no finite number")
            return number

    Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)
    return Loader


def machine_memory() -> int:
    """Return the bytes of memory that this process could get at most: of the machine, its container, or its `ulimit
    -v`.
    """
    return smallest_limit()[0]


def smallest_limit() -> tuple[int, str]:
    """Return (bytes, what sets them) of the smallest limit on the memory of this process."""
    limits = [(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory of the machine")]
    for path in (folder / name for folder in control_groups("memory", *MEMORY_LIMITS) for name in MEMORY_LIMITS):
        with suppress(OSError, ValueError):  # ValueError: "max"
            limits.append((int(path.read_text()), f"container, {path}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return min([*limits, *([] if soft == resource.RLIM_INFINITY else [(soft, "address space, ulimit -v")])])


def control_groups(controller: str, *files: str) -> list[Path]:
    """Return the folders of the control groups of this process that have one of `files`, the limits of a controller:
    its own, and those that they are in.

    In a container the path of its own may be that of the host: then only the root of the container exists.
    """
    try:
        lines = [line.split(":", 2) for line in CGROUPS_OF_PROCESS.read_text().splitlines() if line.count(":") > 1]
    except (OSError, UnicodeDecodeError):
        lines = []
    folders = [CGROUP_ROOT, CGROUP_ROOT / controller]
    for _, controllers, path in lines:
        if not controllers or controller in controllers.split(","):
            roots = [CGROUP_ROOT / controller] if controllers else [CGROUP_ROOT, CGROUP_ROOT / "unified"]
            path = os.path.normpath(f"/{path}")  # nothing above the root
            folders += [Path(f"{root}/{parent}") for root in roots for parent in (path, *Path(path).parents)]
    return [folder for folder in dict.fromkeys(folders) if any(os.path.exists(folder / name) for name in files)]


@contextmanager
def allocating_at_most(size: int) -> Iterator[None]:
    """Let allocations of this process fail, with MemoryError, that would enlarge its address space by more than `size`
    bytes.

    The limit is that of the whole process: other threads should be idle. Without /proc (macOS) there is none.
    """
    if not STATM.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(STATM.read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + size
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def peak_resident_bytes() -> int:
    """Return the largest memory of this process so far (VmHWM of Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return proc_bytes(Path("/proc/self/status"), "VmHWM") or peak


def proc_bytes(path: Path, name: str) -> int | None:
    """Return the bytes of a field of a file such as /proc/meminfo, None where the system does not say."""
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return int(lines[name].split()[0]) * 1024
    return None


def match_patterns(patterns: list[str], texts: list[str]) -> list[list[bool]]:
    """Return for each pattern which texts it matches as a whole.

    `re` searches by trial: `(a+)+b` takes time that doubles with each letter. So a process with limits matches them: this
    file, started by its path; it needs the standard library only.

    Raises ValueError, naming the pattern, for one that is invalid or beyond the limits.
    """
    if too_long := next((pattern for pattern in patterns if len(pattern) > MAX_MATCHED_CHARACTERS), None):
        raise ValueError(
            f"{too_long[:60]}... has {len(too_long):,} characters, at most {MAX_MATCHED_CHARACTERS:,} are allowed"
        )
    shortened = ", ".join(pattern[:60] for pattern in patterns[:3])
    beyond = f"{shortened}: it takes more than {MATCH_SECONDS} seconds or {MATCH_MEMORY >> 20} MiB for {len(texts):,} names; e.g. a repetition inside of a repetition does"
    matched: list[list[bool]] = json.loads(run_limited(["-I", "-S", __file__], [patterns, texts], beyond))
    return matched


def run_limited(command: list[str], request: Any, beyond: str, env: dict[str, str] | None = None) -> bytes:
    """Return the output of a Python process that gets `request` as JSON, and calls `limit_process`.

    Raises ValueError with the last line of its errors, or with `beyond` if the kernel has ended it at a limit.
    """
    try:
        ended = subprocess.run(
            [sys.executable, *command],
            input=json.dumps(request).encode(),
            env=env,
            capture_output=True,
            timeout=OWN_LIMIT,
            process_group=0,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"no result after {OWN_LIMIT} seconds; on a busy machine, try again") from error
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").splitlines()
        raise ValueError(lines[-1][:200] if ended.returncode > 0 and lines else beyond)
    return ended.stdout


def limit_process(memory: int, seconds: int | None = None) -> None:
    """Limit this process to `memory` bytes and `seconds` of processor time, without a core dump and new files."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))


def match_request() -> int:
    """Answer the request of `match_patterns` on standard input."""
    patterns, texts = json.load(sys.stdin)
    limit_process(MATCH_MEMORY, MATCH_SECONDS)
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
