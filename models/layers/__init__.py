"""Layers of the decoder and their operators. Imports torch, models.config and models.activation_checkpointing only."""
