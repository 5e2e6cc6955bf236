"""Layers of the decoder and their operators. Imports torch, models.families and models.config only."""
