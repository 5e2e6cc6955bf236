"""Kernels of FlexAttention fit into the shared memory of each card: triton compiles them for a card that is not there.

By hand: triton is large, and torch for the CPU does not need it. `pip install --target DIR triton==3.8.0`, then
`PYTHONPATH=DIR python -m pytest tests/cuda/test_shared_memory.py` (four minutes of one core for each card).
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CARDS = {  # compute capability, and bytes of shared memory that a block can have
    "T4": ("7.5", 65_536),
    "A100": ("8.0", 166_912),
    "RTX 3090": ("8.6", 101_376),
    "RTX 4090": ("8.9", 101_376),
    "H100": ("9.0", 232_448),
    "RTX 5090": ("12.0", 101_376),
}
FOLDER = Path(__file__).parent


@pytest.mark.slow(long=True)
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which torch for the CPU does not install")
@pytest.mark.parametrize("card", CARDS)
def test_flex_attention_fits_into_the_shared_memory(fake_gpu_library, tmp_path, card):
    capability, limit = CARDS[card]
    folders = [FOLDER, FOLDER.parents[1], *sys.path]
    variables = {
        "FAKE_GPU_LIBRARY": fake_gpu_library,
        "TRITON_CACHE_DIR": tmp_path,
        "TORCHINDUCTOR_CACHE_DIR": tmp_path,
    }
    environment = {name: str(value) for name, value in variables.items()}
    process = subprocess.run(
        [sys.executable, FOLDER / "shared_memory.py", capability, str(limit)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    results = json.loads(process.stdout.splitlines()[-1])
    assert len(results) == (8 if card == "T4" else 12)  # without bf16
    assert {
        case: kernels for case, kernels in results.items() if max(kernels.values(), default=limit + 1) > limit
    } == {}
