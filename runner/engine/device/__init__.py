"""Devices and processes: precision, compilation, random states, ranks.

The only folder that imports torch.distributed.

May import common, models.language_model and torch; torch only inside functions where the config is checked without it.
"""
