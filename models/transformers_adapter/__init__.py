"""Causal language models of transformers as a model family: their classes, with the kernels of this program where those
are exact.
"""
