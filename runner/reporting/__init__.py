"""Pages of runs, sweeps, comparisons and lists, and leaderboards, read from the files of runs.

May import run_dir, tracking and common; no torch, no hydra.
"""
