"""Sweeps: many runs from one command, each in a process and a directory of its own.

`command` starts and resumes a sweep, Hydra's plugins (hydra_plugins/lm_runner) drive it, `scheduler` runs its jobs on a
backend. May import hydra, reporting, launch, run_dir, config, engine, checkpoint and common.
"""
