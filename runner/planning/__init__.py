"""Plan a run or a sweep before it trains: sizes, steps, memory by part, time of steps that are really run, disk, and a
verdict.

Imports everything below runner.cli; only `trial` executes training steps, in a process of its own.
"""
