"""Where the jobs of a sweep run: local processes, submitit (Slurm), Ray.

`base` is the interface. Imports: launch, common.
"""

from __future__ import annotations

from runner.sweep.backends.local import LocalOptions
from runner.sweep.backends.ray import RayOptions
from runner.sweep.backends.submitit import SubmititOptions

LAUNCHERS = {"local": LocalOptions, "submitit": SubmititOptions, "ray": RayOptions}  # options of hydra/launcher
