"""Sweeps: many runs from one command, each in a process and a directory of its own.

`command` starts and resumes a sweep and runs its jobs on a backend, Hydra's plugins (hydra_plugins/lm_runner) drive it. May import hydra, reporting, launch, run_dir, config, engine, checkpoint and common.
"""
