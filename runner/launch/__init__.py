"""The processes of one run: the function that starts it, local ranks, ranks of torchrun, signals.

May import run_dir, config, inference, engine, checkpoint, tracking, data, models and common; no hydra, no omegaconf.
"""
