"""Evaluation metrics, one module each, found by `metric=NAME`.

May import runner.inference and what it imports.
"""
