"""What a run leaves on disk: its directory, lock, run.json, saved config; and how it is resumed from there.

May import common, data, models, runner.checkpoint, runner.engine (config), runner.config. Only resume.py imports hydra
itself.
"""
