"""Model families, one module each: a config class registered in MODELS, found by `model.family`.

Imports models.config and common only.
"""
