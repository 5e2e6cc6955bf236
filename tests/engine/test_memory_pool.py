"""The memory pool of large CPU tensors: its blocks keep their contents, are used again, and change no result."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from warm_programs import WarmPrograms

from models.layers.cpu_kernels import library
from models.layers.cpu_kernels.library import KernelsUnavailableError
from runner.engine import kernels
from runner.engine.device import cpu
from runner.engine.device.compile import CompileDecision

ROOT = Path(__file__).parents[2]
needs_pool = pytest.mark.skipif(platform.system() != "Linux", reason="the pool is for Linux")


def in_child(test):
    """A test in a fork of a process that has imported torch, whose start takes three seconds."""
    return needs_pool(pytest.mark.slow(test))


PRELUDE = """
import json, os, sys
from pathlib import Path
for name in [*os.environ]:
    if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")):
        del os.environ[name]
import torch
from runner.engine.device.cpu import pool_size, use_memory_pool

MIB = 1 << 20

def block(mib, value=0):
    return torch.full((int(mib * MIB),), value, dtype=torch.uint8)
"""
USE_POOL = """
reason = use_memory_pool(Path(sys.argv[1]))
assert not reason, reason
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def child(programs: Path, tmp_path: Path, warm: WarmPrograms):
    """`child(code)`: run it in a process that uses the pool; return the JSON values that it prints, a line each."""

    def run(code: str, use: str = USE_POOL) -> list:
        script, output = tmp_path / "code.py", tmp_path / "output"
        script.write_text(PRELUDE + use + code)
        status = warm.start(script, str(programs), cwd=ROOT, out=output).wait(500)
        assert status == 0, output.read_text()
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


@in_child
def test_blocks_are_aligned_and_keep_their_contents_among_threads(child) -> None:
    """Each thread frees and allocates blocks of random sizes, among them those that glibc keeps, and looks at all of
    its own.
    """
    code = """
import random, threading
damaged = []

def work(seed):
    chance, blocks = random.Random(seed), {}
    for number in range(400):
        if len(blocks) > 12:
            value, old = blocks.popitem() if chance.random() < 0.5 else (key := next(iter(blocks)), blocks.pop(key))
            if not bool((old == value % 251).all()):
                damaged.append(value)
        size = chance.choice([1, 1000, 65535, 65536, 65537, chance.randrange(1, 3 * MIB)])
        blocks[number] = torch.full((size,), number % 251, dtype=torch.uint8)
        if blocks[number].data_ptr() % 64:
            damaged.append("alignment")
    damaged.extend(value for value, old in blocks.items() if not bool((old == value % 251).all()))

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(damaged))
print(json.dumps(pool_size() // MIB))
"""
    damaged, size = child(code)
    assert damaged == [] and 16 < size < 256  # at most 4 * 13 blocks of 3 MiB, and holes


@in_child
def test_freed_neighbours_join_whatever_their_order(child) -> None:
    """24 MiB in blocks of 1 MiB, freed in each of several orders, then hold one block of 24 MiB: the pool does not
    grow.
    """
    code = """
sizes = []
for order in (range(24), range(23, -1, -1), [*range(0, 24, 2), *range(1, 24, 2)], [*range(12, 24), *range(12)]):
    blocks = [block(1, number) for number in range(24)]
    for number in order:
        blocks[number] = None
    whole = block(24)
    sizes.append(pool_size())
    del whole
print(json.dumps(sizes))
"""
    (sizes,) = child(code)
    assert sizes == [24 << 20] * 4


@in_child
def test_smallest_hole_that_is_large_enough_is_used(child) -> None:
    code = """
keep, holes = [], []
for mib in (4, 2, 3):
    holes.append(block(mib))
    keep.append(block(1))
addresses = [each.data_ptr() for each in holes]
holes.clear()
print(json.dumps([addresses.index(block(mib).data_ptr()) for mib in (2, 2.5, 3.5)]))
"""
    assert child(code) == [[1, 2, 0]]


@in_child
def test_small_tensors_stay_in_the_heap_and_a_huge_block_is_refused(child) -> None:
    code = """
small = torch.zeros(65535, dtype=torch.uint8)
print(json.dumps(pool_size()))
try:
    torch.empty(1 << 45, dtype=torch.uint8)
    print(json.dumps("allocated"))
except RuntimeError as error:
    print(json.dumps(str(error)))
print(json.dumps(block(1, 7).sum().item()))
"""
    empty, message, after = child(code)
    assert empty == 0 and "can't allocate memory" in message and after == 7 << 20


# 1 GiB, 512 MiB free; 64 MiB swap
MACHINE = "MemTotal: 1048576 kB\nMemFree: 9 kB\nMemAvailable: 524288 kB\nSwapTotal: 65536 kB\nSwapFree: 65536 kB\n"
MIB = 1 << 20


@pytest.mark.slow
@needs_pool
@pytest.mark.parametrize(
    ("meminfo", "cgroup", "available"),
    [
        (MACHINE, {}, 512 + 64),
        (MACHINE.replace("524288", "1048576"), {}, 1024 + 64),
        (MACHINE, {"memory.max": "max", "memory.current": 900 * MIB}, 512 + 64),
        (
            MACHINE,
            {
                "memory.max": 300 * MIB,
                "memory.current": 120 * MIB,
                "memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
            },
            300 - 120 + 20 + 64,
        ),
        (
            MACHINE,
            {
                "memory.max": 300 * MIB,
                "memory.current": 120 * MIB,
                "memory.swap.max": 9 * MIB,
                "memory.swap.current": MIB,
            },
            300 - 120 + 8,
        ),
        (MACHINE, {"memory.max": 300 * MIB, "memory.current": 310 * MIB, "memory.swap.max": 0}, 0),
        (MACHINE, {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 900 * MIB}, 512 + 64),
        (
            MACHINE,
            {
                "memory.limit_in_bytes": 300 * MIB,
                "memory.usage_in_bytes": 100 * MIB,
                "memory.stat": f"total_active_file {MIB}\n",
            },
            201 + 64,
        ),
        (
            MACHINE,
            {
                "memory.limit_in_bytes": 300 * MIB,
                "memory.memsw.limit_in_bytes": 310 * MIB,
                "memory.memsw.usage_in_bytes": 20 * MIB,
            },
            290,
        ),
    ],
)
def test_available_memory_is_bounded_by_swap_and_cgroup(
    programs: Path, tmp_path: Path, meminfo: str, cgroup: dict[str, object], available: int
) -> None:
    (tmp_path / "meminfo").write_text(meminfo)
    for name, content in cgroup.items():
        (tmp_path / name).write_text(str(content))
    function = library.load_library("memory_pool", [cpu.POOL_SOURCE], programs).lm_runner_available_memory
    function.restype = ctypes.c_size_t
    folders = os.fsencode(tmp_path / "meminfo"), os.fsencode(tmp_path)
    assert function(*folders, ctypes.c_size_t(0)) == available * MIB
    assert function(*folders, ctypes.c_size_t(1000 * MIB)) == min(available, 88) * MIB


@in_child
def test_pool_refuses_a_block_larger_than_the_memory_that_is_available(child) -> None:
    """Its region is reserved without memory: the kernel grants any growth, and kills the process when it writes to it."""
    code = """
from common.limits import smallest_limit

def attempt(*sizes):
    try:
        blocks = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        print(json.dumps("allocated"))
    except RuntimeError as error:
        print(json.dumps(str(error)))

attempt(768 << 30)
attempt(*[smallest_limit()[0] // 3] * 100)  # not written to: none of them is more than what is available
attempt(*[64 * MIB] * 2)
"""
    large, many, small = child(code)
    assert (
        "can't allocate memory: the memory pool has 0 bytes and needs 824633720832 more" in large
        and "can't allocate memory" in many
    )
    assert small == "allocated"


@in_child
def test_forked_process_can_allocate_while_threads_of_its_parent_do(child) -> None:
    """Without a handler of fork, a child that is forked while a thread holds the lock of the pool waits for ever.

    The threads allocate within operators, which do not hold the lock of Python.
    """
    code = """
import signal, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
stop = threading.Event()
operands = [torch.zeros(1 << 16, dtype=torch.uint8)] * 1000

def work():
    while not stop.is_set():
        torch._foreach_add(operands, 1)

threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
codes = []
for _ in range(50):
    if (process := os.fork()) == 0:
        signal.alarm(20)
        torch.empty(1 << 17, dtype=torch.uint8)
        os._exit(0)
    codes.append(os.waitpid(process, 0)[1])
    if codes[-1]:
        break
stop.set()
[thread.join() for thread in threads]
print(json.dumps(sorted(set(codes))))
"""
    assert child(code) == [[0]]


@in_child
def test_profiler_counts_blocks_of_the_pool(child) -> None:
    code = """
from torch.profiler import profile
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs its start
with profile(profile_memory=True) as recorded:
    kept = torch.empty(3 * MIB, dtype=torch.uint8)
print(json.dumps(sum(event.self_cpu_memory_usage for event in recorded.key_averages())))
"""
    assert child(code) == [3 << 20]


@needs_pool
@pytest.mark.slow
def test_steps_in_the_pool_are_bitwise_equal_and_stop_growing(programs: Path) -> None:
    """A model whose weights were made before the pool trains as without it; buffers of ATen, oneDNN and autograd come
    from the pool.
    """
    code = """
import sys, hashlib
from pathlib import Path
import torch
from runner.engine.device.cpu import pool_size, use_memory_pool

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
if sys.argv[2] == "pool":
    assert not use_memory_pool(Path(sys.argv[1]))
sizes = []
for step in range(5):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(1024, 256)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sizes.append(pool_size())
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(digest, (sizes[-1] > 1 << 23) == (sys.argv[2] == "pool"), sizes[-1] == sizes[2])
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(programs), kind], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for kind in ("pool", "heap")
    ]
    assert runs[0] == runs[1] and runs[0].split()[1:] == ["True", "True"]


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_allocator_chosen_by_the_environment_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cpu, "_pool", None)
    monkeypatch.setenv(name, "x")
    monkeypatch.setattr(library, "load_library", lambda *_: pytest.fail("compiled"))
    assert cpu.use_memory_pool(tmp_path) == "the environment chooses another allocator"


@needs_pool
@pytest.mark.slow
def test_limit_of_addresses_leaves_them_to_the_run(programs: Path) -> None:
    """A region of reserved addresses would take those that the tensors of the run need."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n" + (
        "from pathlib import Path; from runner.engine.device.cpu import use_memory_pool; print(use_memory_pool(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(programs)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "the process has a limit of its addresses (ulimit -v)"


def test_machine_without_a_compiler_trains_without_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_):
        raise KernelsUnavailableError("no C++ compiler, neither g++ nor CXX")

    monkeypatch.setattr(cpu, "_pool", None)
    monkeypatch.setattr(library, "load_library", unavailable)
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    reason = cpu.use_memory_pool(tmp_path)
    assert reason == (
        "no C++ compiler, neither g++ nor CXX" if platform.system() == "Linux" else f"not on {platform.system()}"
    )
    assert cpu.pool_size() == 0


@pytest.mark.parametrize("is_long_run", [True, False])
def test_long_runs_use_the_pool(make_run, monkeypatch: pytest.MonkeyPatch, is_long_run: bool) -> None:
    folders = []
    monkeypatch.setattr(kernels, "use_memory_pool", lambda folder: folders.append(folder) or "")
    monkeypatch.setattr(
        kernels, "resolve_compile_mode", lambda *_: CompileDecision("off", "off", is_long_run=is_long_run)
    )
    make_run("pretrain")
    assert len(folders) == is_long_run
