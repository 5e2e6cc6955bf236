"""Objectives: what a stage minimizes, as sums over countable items.

May import common, data.batching and models.

config.py has the registry and next-token prediction; each other objective is one module here, found by its name
(dpo.py), or a class in a plugin. torch is imported inside functions only, so that settings are checked without it.
"""
