"""Optimizers, parameter groups and learning-rate schedules.

config.py has the registry of optimizers, AdamW and Muon; each other one is one module here, found by its name, or a
class in a plugin. schedules.py has all schedules. May import common, runner.engine.device and torch; torch only inside
functions, except in torch_optimizers.py.
"""
