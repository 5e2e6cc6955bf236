"""The processes of one run: the function that starts it, local ranks, ranks of torchrun, signals.

May import run_dir, config, engine, checkpoint, tracking, data, models and common; it does not import hydra itself.
"""
