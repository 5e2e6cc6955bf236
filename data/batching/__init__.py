"""Batches of encoded rows: mixing, packing, sampling, micro-batches.

May import data.store, data.sources, data.types and common; torch in batch.py and loader.py only.
"""
