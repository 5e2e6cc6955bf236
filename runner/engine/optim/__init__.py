"""Optimizers, parameter groups and learning-rate schedules.

config.py has the registry of optimizers; each of them is one module here, found by its name (adamw.py, muon.py), or a
class in a plugin. schedules.py has all schedules. May import common, runner.engine.device and torch; torch only inside
functions, except in torch_optimizers.py.
"""
