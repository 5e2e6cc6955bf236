"""How a run begins and ends: initial weights, start, resume, local ranks, ranks of torchrun, signals.

May import run_dir, config, engine, checkpoint, tracking, data, models and common. Only resume.py imports hydra itself.
"""
