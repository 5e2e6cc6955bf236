"""Overrides -> Config: checks and normalises what the user types, composes it with Hydra, converts it to dataclasses.

May import common, data, models, runner.engine (config) and the sections' own modules, Hydra.
"""
