"""Language models: settings, layers, LoRA, generation, checkpoint formats. Imports torch, safetensors, transformers and common only.

A new model family: its settings and its `LanguageModel` in a module here, its config.json in a module of formats/, a row in registry.py.
"""
