"""Whether matrix products in the precision of a run are slower than in fp32 on this processor: without AMX, those in bf16 may be."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runner.engine.device.cpu.measured_choice import shortest_times

if TYPE_CHECKING:
    import torch

PRODUCT = (1_024, 512, 1_024)  # (M, K, N): 1.1 GFLOP
PRODUCT_TURNS, PRODUCT_PASSES = 3, 2
SLOWER = 1.25  # times the time of fp32: less may be chance


def slow_precision_warning(name: str, dtype: torch.dtype) -> str | None:
    """Return a warning if products in `dtype` take more time than in fp32. name: of the setting `precision`."""
    import torch

    if dtype == torch.float32:
        return None
    times = time_products([torch.float32, dtype])
    ratio = times[str(dtype)] / times[str(torch.float32)]
    if ratio < SLOWER:
        return None
    return f"matrix products in {name} take {ratio:.1f} times as long as in fp32 on this processor: precision=fp32 is faster, and more exact"


def time_products(dtypes: list[torch.dtype]) -> dict[str, float]:
    """Return str(dtype) -> the shortest time of a product, seconds."""
    import torch

    M, K, N = PRODUCT
    pairs = {str(dtype): (torch.ones(M, K, dtype=dtype), torch.ones(N, K, dtype=dtype)) for dtype in dtypes}
    return shortest_times({name: partial(torch.nn.functional.linear, *pair) for name, pair in pairs.items()}, PRODUCT_TURNS, PRODUCT_PASSES)
