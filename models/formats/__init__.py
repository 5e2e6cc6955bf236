"""Model folders on disk: Hugging Face, PEFT, MiniMind .pth.

Imports torch, safetensors, models and common only.
"""
