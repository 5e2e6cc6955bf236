"""Where the jobs of a sweep run: local processes, submitit (Slurm), Ray.

`base` is the interface. Imports: launch, common.
"""

from __future__ import annotations

from runner.sweep.backends.local import LocalBackend
from runner.sweep.backends.ray import RayBackend
from runner.sweep.backends.submitit import SubmititBackend

LAUNCHERS = {"local": LocalBackend, "submitit": SubmititBackend, "ray": RayBackend}  # options of hydra/launcher
