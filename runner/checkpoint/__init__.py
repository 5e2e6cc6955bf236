"""Checkpoints of a run: format, save, load, retain.

Imports common/ only; it sees dicts and tensors, never the engine's objects.
"""
