"""Process of one case of speed.py, commits.py or gpu.py: `python -m lib.case_process SPEC`; it answers each request on
stdin with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

from lib import trainers
from lib.cases import Gate, machine, ours

Case = Callable[[dict, Gate], None]

CASES: dict[str, Case] = {
    "machine": machine,
    "ours, packed": ours,
    "ours, packed, compiled": partial(ours, compile="default"),
    "ours, padded": partial(ours, packing="none", too_long="truncate"),
    "MiniMind's script": trainers.minimind,
    "HF Trainer, packed": partial(trainers.hf, compiled=False),
    "HF Trainer, packed, compiled": partial(trainers.hf, compiled=True),
    "TRL SFTTrainer, padded": partial(trainers.trl, packing=False),
    "TRL SFTTrainer, packed": partial(trainers.trl, packing=True),
    "litgpt, equal lengths": partial(trainers.litgpt, compiled=False),
    "litgpt, equal lengths, compiled": partial(trainers.litgpt, compiled=True),
    "nanochat, its own model, equal lengths": partial(trainers.nanochat, compiled=False),
    "nanochat, its own model, equal lengths, compiled": partial(trainers.nanochat, compiled=True),
}
# Run only where --cases names them: cost and saving of activation checkpointing
EXTRA_CASES: dict[str, Case] = {
    f"activation checkpointing {recompute}, packed{', compiled' * compiled}": partial(
        ours, compile="default" if compiled else "off", recompute=recompute
    )
    for compiled in (False, True)
    for recompute in ("selective", "full")
}


def main(spec: dict) -> None:
    case = partial(ours, compile=spec["compile"]) if spec["case"] == "ours" else (CASES | EXTRA_CASES)[spec["case"]]
    case(spec, Gate(spec))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
