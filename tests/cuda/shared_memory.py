"""`python shared_memory.py 8.6 101376 ["float32 96"]`: prints case -> kernel -> bytes of shared memory, of the kernels of FlexAttention
for GPUs of that compute capability and with so much shared memory for a block.

Needs triton, and FAKE_GPU_LIBRARY (see fake_gpu.py). Triton compiles for a GPU that is not there.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import fake_gpu
import torch
import triton
from torch._inductor import config as inductor
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from models.layers.attention import attention, document_blocks

CAPABILITY = tuple(map(int, sys.argv[1].split(".")))
LIMIT, CASES = int(sys.argv[2]), sys.argv[3:]
TARGET = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
DTYPES = {"float32": (7, 5), "float16": (7, 5), "bfloat16": (8, 0)}  # and the first capability that has it
HEADS = {32: (4, 2), 64: (8, 2), 96: (8, 4), 128: (16, 8)}  # head width -> query and key heads
PROPERTIES = SimpleNamespace(
    name="x",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=100,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    total_memory=16 << 30,
    L2_cache_size=40 << 20,
    shared_memory_per_block_optin=LIMIT,
    shared_memory_per_block=49152,
    gcnArchName="",
    uuid="0",
)
SHARED: dict[str, int] = {}  # of the kernels of a case


class Driver:
    """What torch and triton ask of the driver."""

    launcher_cls = None
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": LIMIT, "multiprocessor_count": 100, "warpSize": 32, "max_num_regs": 65536, "sm_clock_rate": 1, "mem_clock_rate": 1, "mem_bus_width": 1})  # fmt: skip

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    get_current_stream = set_current_device = get_benchmarker = lambda self, *_: 0

    def get_device_capability(self, *_: object) -> tuple[int, ...]:
        return CAPABILITY

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    @classmethod
    def is_active(cls) -> bool:
        return True


def compile_kernel(self: Any, *_: object, **__: object) -> None:
    """In place of CachingAutotuner.precompile, which loads kernels and times them."""
    for chosen in self.configs:
        meta = self._create_compile_meta(chosen)
        source = ASTSource(self.fn, meta["signature"], meta["constants"], meta["configs"][0])
        kernel = triton.compile(source, target=TARGET, options=self._create_compile_options(chosen, meta))
        name = self.inductor_meta["kernel_name"]
        SHARED[name] = max(SHARED.get(name, 0), kernel.metadata.shared)


def replace_device() -> Any:
    mode = fake_gpu.pretend_gpus()
    for name in ("_cuda_getDevice", "_cuda_setDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice", "_cuda_getCurrentRawStream"):  # fmt: skip
        setattr(torch._C, name, lambda *_: 0)
    torch._C._cuda_isInBadFork = torch._C._cuda_isCurrentStreamCapturing = lambda: False
    torch._C._cuda_getCompiledVersion = lambda: 13000
    torch._C._cuda_getArchFlags = lambda: f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: CAPABILITY
    cuda.get_device_properties = cuda._get_device_properties = lambda device=None: PROPERTIES
    cuda.is_initialized = lambda: True
    cuda.synchronize = lambda device=None: None
    cuda.current_device = lambda: 0
    torch.version.cuda = "13.0"
    inductor.compile_threads, inductor.fx_graph_cache, inductor.autotune_local_cache = 1, False, False
    triton_helpers.set_driver_to_gpu = joint_graph.lazy_init = post_grad.lazy_init = lambda *_, **__: None
    triton.runtime.driver.set_active(Driver())
    triton.runtime.driver._default = Driver()
    triton_heuristics.CachingAutotuner.precompile = compile_kernel
    return mode


def main() -> None:
    mode = replace_device()
    results = {}
    for dtype, first in DTYPES.items():
        for width, (heads, groups) in HEADS.items():
            if first > CAPABILITY or (CASES and f"{dtype} {width}" not in CASES):
                continue
            torch.compiler.reset()
            SHARED.clear()
            with mode, torch.device("cuda", 0):
                options = {"dtype": getattr(torch, dtype), "requires_grad": True}
                q = torch.empty(4, heads, 1024, width, **options)
                k, v = (torch.empty(4, groups, 1024, width, **options) for _ in range(2))
                mask = document_blocks(torch.zeros(4, 1024, dtype=torch.long))
            try:
                torch.compile(attention, dynamic=True)(q, k, v, mask, 0.0, "auto")
            except Exception as error:  # nothing is loaded, so nothing can run
                print(f"{dtype} {width}: {SHARED}; {str(error).partition(chr(10))[0]}", file=sys.stderr, flush=True)
            results[f"{dtype} {width}"] = dict(SHARED)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
