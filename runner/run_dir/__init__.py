"""What a run leaves on disk: its directory, lock, run.json and saved config, and the best job of a sweep.

May import common and runner.checkpoint.
"""
