"""Command lines: flags and overrides -> the action of a command; help texts; exit codes.

May import every other package of runner, and Hydra.
"""
