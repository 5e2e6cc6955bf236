"""Language models: settings, layers, LoRA, generation, checkpoint formats.

Imports torch, safetensors, transformers and common only.

A new model family: its settings and its config.json in a module of families/, its `LanguageModel` in a module here.
"""
