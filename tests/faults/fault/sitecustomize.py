"""On the PYTHONPATH of a run: run code after a step of one rank, once.

FAULT={"rank": 1, "step": 3, "code": "raise KeyError('lost')", "once": FILE}

"after": a file or folder that must exist before, e.g. a checkpoint that is written in the background.
"""

import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.util import find_spec

fault = json.loads(os.environ.get("FAULT", "{}"))


class LoopFinder(MetaPathFinder):
    """Waits for the import of the training loop and wraps its function `step_with_retries`."""

    def find_spec(self, name, path, target=None):
        if name != "runner.engine.loop":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.step_with_retries = with_fault(module.step_with_retries)

        spec.loader.exec_module = exec_module
        return spec


def with_fault(step_with_retries):
    def step(state, *args):
        result = step_with_retries(state, *args)
        if state.progress.step == fault["step"] and not os.path.exists(fault["once"]):
            open(fault["once"], "w").close()
            while not os.path.exists(fault.get("after", "/")):
                time.sleep(0.01)
            exec(fault["code"])
        return result

    return step


if fault and os.environ.get("RANK") == str(fault["rank"]):
    if "runner.engine.loop" in sys.modules:  # in a fork, see tests/warm_programs.py
        loop = sys.modules["runner.engine.loop"]
        loop.step_with_retries = with_fault(loop.step_with_retries)
    else:
        sys.meta_path.insert(0, LoopFinder())
