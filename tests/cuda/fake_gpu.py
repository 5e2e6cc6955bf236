"""GPUs that compute nothing: tensors of `cuda` without data, with autograd, in a build of torch for the CPU.

Imported before torch, which asks once which accelerators there are. A number that the host asks such a GPU for is 1.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

torch_libraries = Path(find_spec("torch").origin).parent / "lib"
for library in (torch_libraries / "libc10.so", torch_libraries / "libtorch_cpu.so", os.environ["FAKE_GPU_LIBRARY"]):
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

import torch  # noqa: E402  after its libraries
from torch import Tensor  # noqa: E402  after its libraries
from torch._subclasses import fake_tensor  # noqa: E402  after its libraries
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402  after its libraries
from torch.cuda.amp import common as cuda_amp  # noqa: E402  after its libraries
from torch.utils import _foreach_utils as foreach  # noqa: E402  after its libraries
from torch.utils._mode_utils import no_dispatch  # noqa: E402  after its libraries
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  after its libraries

aten = torch.ops.aten
TORCH_ATTENTION = torch.nn.functional.scaled_dot_product_attention
GPUS, MEMORY = 2, 80 << 30  # of fake_gpu.cpp; bytes
ANSWERS: dict[str, Any] = {  # of torch.cuda
    "is_available": True,
    "device_count": GPUS,
    "get_device_name": "a fake GPU",
    "get_device_capability": (9, 0),
    "is_bf16_supported": True,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
    "max_memory_allocated": 0,
    "mem_get_info": (MEMORY, MEMORY),
    "_lazy_init": None,
}
# operators without a kernel
VIEWS = {"alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_record_function_enter_new", "_record_function_exit", "_unsafe_view"}  # fmt: skip
# operators whose result, or its shape, Python needs as a number
SYNCING = {"_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}


class Stream:
    """Of nothing; also an event."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, *_: object) -> Stream:
        return self

    record = synchronize = wait = wait_event = wait_stream = record_event


def exchange_device(number: int) -> int:
    before = torch._C._accelerator_getDeviceIndex()
    torch._C._accelerator_setDeviceIndex(number)
    return before


def is_boolean(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.bool


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention by the kernel that a GPU has: torch for the CPU takes another."""
    if attn_mask is None and q.dtype.itemsize == 2 and torch.backends.cuda.flash_sdp_enabled():
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
    if q.shape[1] == k.shape[1] and torch.backends.cuda.mem_efficient_sdp_enabled():
        bias = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype) if is_boolean(attn_mask) else attn_mask
        assert bias is None or bias.dtype == q.dtype
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, is_causal)[0]
    raise RuntimeError(f"no fast kernel: {q.dtype}, {q.shape[1]} and {k.shape[1]} heads, mask: {attn_mask is not None}")


def pretend_gpus() -> FakeTensorMode:
    """Let this process find GPUS of compute capability 9.0; return the mode in which their tensors are made."""
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.current_stream = lambda *_: Stream()
    torch.cuda.current_device = torch._C._accelerator_getDeviceIndex
    torch.cuda.set_device = lambda device: torch._C._accelerator_setDeviceIndex(torch.device(device).index)
    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = exchange_device, partial(exchange_device)
    cuda_amp.amp_definitely_not_available = lambda: False
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.stream = nullcontext
    fake_tensor.init_gpu_context = lambda device: None
    FakeTensorMode.avoid_device_init = True
    torch.nn.functional.scaled_dot_product_attention = attention
    foreach._foreach_supported_types.append(FakeTensor)
    numpy = Tensor.numpy

    def numpy_of_cpu(tensor: Tensor) -> Any:
        assert not isinstance(tensor, FakeTensor)
        with no_dispatch():
            return numpy(tensor)

    Tensor.numpy = numpy_of_cpu
    return FakeTensorMode(allow_non_fake_inputs=True)


class Launches(TorchDispatchMode):
    """Counts operators that launch kernels; collects, by phase, the devices of results and what makes the host wait.

    Operators that others call do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""  # between steps
        self.operators: Counter[str] = Counter()
        self.syncs: set[tuple[str, str]] = set()
        self.devices: set[tuple[str, str]] = set()
        self.integer = 1  # what a GPU answers

    def within(self, phase: str, function: Any) -> Any:
        """Return the function as a part of the phase."""

        def call(*args: Any, **options: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **options)
            finally:
                self.phase = before

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__.partition(".")[0], kwargs or {}
        if name in SYNCING or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.syncs.add((self.phase, name))
        if name == "bincount":  # of the experts of all tokens, equally often
            self.integer = args[0].numel() // args[2]
            return args[0].new_empty(args[2])
        if name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else self.integer
        result = func(*args, **kwargs)
        if name not in VIEWS:
            self.operators[name] += 1
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, Tensor):
                    self.devices.add((self.phase, str(tensor.device)))
            self._note_copy(name, args, kwargs, result)
        return result

    def _note_copy(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        source = {"_to_copy": 0, "copy_": 1}.get(name)
        if source is None or kwargs.get("non_blocking") or True in args[2:]:
            return
        if args[source].device != result.device:
            self.syncs.add((self.phase, f"copy from {args[source].device.type} to {result.device.type}"))
