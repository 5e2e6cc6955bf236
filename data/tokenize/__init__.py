"""Tokenizers, chat templates, and the encoding of rows as token ids.

May import data.schemas, data.sources, data.types, data.types and common; no torch.
"""
