"""Command lines: flags and overrides -> the action of a command; help texts.

May import every other package of runner, and Hydra.
"""
