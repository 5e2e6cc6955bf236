"""Libraries of the benchmarks: results, runs of a checkout, cases in processes that take turns.

Importing it makes the checkout's packages importable.

The checkout is the one of this file, or, in the processes of another one (commits.py), the value of CHECKOUT_VARIABLE.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKOUT_VARIABLE = "LM_RUNNER_BENCHMARK_CHECKOUT"
CHECKOUT = os.environ.get(CHECKOUT_VARIABLE, str(ROOT))

if CHECKOUT not in sys.path:
    sys.path.insert(0, CHECKOUT)
