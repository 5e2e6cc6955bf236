"""C++ sources compiled for this processor by the compiler that torch.compile uses, loaded, and called: the kernels for
x86 (*.cpp), and `load_library` for others.

They need only libtorch, whose matrix products of oneDNN the kernels use, so nothing has to be installed. The compiler
takes six seconds; the library is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
# no -ffast-math: NaN must stay NaN
FLAGS = """
    -std=c++20 -O3 -march=native -mprefer-vector-width=512 -fno-math-errno -fopenmp -fPIC -shared -Wno-psabi
""".split()
COMPILE_TIMEOUT = 300.0
BUILD_PREFIX = "tmp"  # of the folder of a build
MACHINES = ("x86_64", "AMD64")
FOLDER = "cpu_kernels"  # in that of compiled programs
CHECKSUM_BYTES = 32  # sha256
MAX_MESSAGE = 300  # characters of what the compiler says

_library: ctypes.CDLL | None = None


class KernelsUnavailableError(Exception):
    """This machine cannot compile or load the C++ code; the text says why."""


def load_kernels(folder: Path) -> None:
    """Compile the kernels into `folder`, a private one, unless that was done before, and load them into this process.

    Raises KernelsUnavailableError.
    """
    global _library
    if _library is not None:
        return
    if not is_supported_machine():
        raise KernelsUnavailableError(f"they are for Linux on x86, not {platform.system()} on {platform.machine()}")
    _library = load_library("kernels", SOURCES, folder)


def is_supported_machine() -> bool:
    return platform.machine() in MACHINES and platform.system() == "Linux"


def load_library(name: str, sources: Sequence[Path], folder: Path) -> ctypes.CDLL:
    """Return the compiled `sources`, which may include headers beside them, from `folder`, a private one; compile them
    first unless that was done before.

    Raises KernelsUnavailableError.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelsUnavailableError("no C++ compiler, neither g++ nor CXX")
    try:
        headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
        library = folder / FOLDER / f"{name}-{_fingerprint(compiler, (*sources, *headers))}.so"
        if not _is_intact(library):  # a crash of the machine or a bad disk can leave zeros in it
            _compile(compiler, sources, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailableError(str(error)[:MAX_MESSAGE]) from error


def call_kernel(name: str, *arguments: Tensor | list[Tensor] | list[int] | float | None) -> None:
    """Call a function of the library with these arguments and the number of threads.

    Raises KernelsUnavailableError where oneDNN has no such matrix product for this processor, ValueError for a mask
    that is not one of documents, MemoryError.
    """
    assert _library is not None, "load_kernels was not called"
    status = getattr(_library, name)(*map(_as_c, arguments), ctypes.c_int(torch.get_num_threads()))
    if status == 1:
        raise KernelsUnavailableError("oneDNN has no matrix product of this type for this processor")
    if status == 2:
        raise ValueError(f"{name} needs a mask of documents")
    if status == 3:
        raise MemoryError(f"{name} could not allocate its buffers")


def _as_c(value: Tensor | list[Tensor] | list[int] | float | None) -> object:
    """Return the address of a tensor, an array of addresses or of int64, int for a bool, int64, float, or null."""
    if isinstance(value, list):
        numbers = [item.data_ptr() if isinstance(item, Tensor) else item for item in value]
        return (ctypes.c_int64 * len(numbers))(*numbers)
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, int | float):
        return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
    return ctypes.c_void_p(None if value is None else value.data_ptr())


def _compile(compiler: str, sources: Sequence[Path], library: Path) -> None:
    """Write `library` at once, so that another process never loads a part of it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    for left in library.parent.glob(f"{BUILD_PREFIX}*"):  # by a build that was killed: no other takes that long
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > 2 * COMPILE_TIMEOUT:
                shutil.rmtree(left, ignore_errors=True)
    torch_folder = Path(torch.__file__).parent
    locations = (
        f"-I{torch_folder / 'include'}",
        f"-L{torch_folder / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    )
    with tempfile.TemporaryDirectory(prefix=BUILD_PREFIX, dir=library.parent) as folder:
        output = Path(folder) / library.name
        try:  # in a session of its own: Ctrl-C of a terminal is the run's
            subprocess.run(
                [compiler, *FLAGS, *map(str, sources), "-o", str(output), *locations],
                check=True,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=COMPILE_TIMEOUT,
                start_new_session=True,
            )
        except subprocess.CalledProcessError as error:
            lines = error.stderr.decode("utf-8", "replace").splitlines()
            reason = next((line for line in lines if "error" in line), f"{compiler} ended with {error.returncode}")
            raise KernelsUnavailableError(reason[:MAX_MESSAGE]) from error
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailableError(f"{compiler} took longer than {COMPILE_TIMEOUT:.0f} s") from error
        with output.open("rb+") as file:
            # after the last byte, in the same file: both are there or neither
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(output, library)


def _is_intact(library: Path) -> bool:
    """Return whether the library exists and ends with the checksum of all before it.

    The loader ignores what follows the last section.
    """
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-CHECKSUM_BYTES]).digest() == content[-CHECKSUM_BYTES:]


@cache
def _fingerprint(compiler: str, files: tuple[Path, ...]) -> str:
    """Return what the compiled library depends on, hashed: source, flags, compiler, torch and the instruction sets of
    the processor.
    """
    version = subprocess.run(
        [compiler, "--version"], check=False, capture_output=True, timeout=COMPILE_TIMEOUT, stdin=subprocess.DEVNULL
    ).stdout
    processor = next(
        (part for part in Path("/proc/cpuinfo").read_bytes().split(b"\n") if part.startswith(b"flags")), b""
    )
    torch_build = f"{torch.__version__} {Path(torch.__file__).parent} {torch.__config__.show()}".encode()
    parts = [
        *(file.read_bytes() for file in files),
        " ".join(FLAGS).encode(),
        compiler.encode(),
        version,
        processor,
        torch_build,
    ]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]
