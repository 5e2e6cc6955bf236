"""Libraries of the benchmarks: results, runs of this checkout, cases in processes that take turns. Importing it makes the checkout's packages importable."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
