"""Token stores: encoded rows of a file, cached on disk.

May import data.tokenize, data.schemas, data.sources, data.types and common; no torch.
"""
