"""The training engine: config, build, loop, evaluation, export of one run, on one process or several ranks. Plain
PyTorch, no Hydra.

Read loop.py first. Subfolders: objectives (what is minimized), optim (optimizers, schedules), device (precision, ranks,
compilation). May import common, data, models, runner.checkpoint and runner.tracking.
"""
