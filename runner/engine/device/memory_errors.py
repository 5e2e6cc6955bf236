"""Errors that mean a lack of memory."""

from __future__ import annotations

# of a RuntimeError of PyTorch
OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that this machine, or its GPU, has no memory left."""
    import torch

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in OUT_OF_MEMORY_TEXTS)
    )
