"""Leaderboard, CSV and HTML report of a sweep, read from its files.

May import run_dir, tracking and common; no torch, no hydra.
"""
