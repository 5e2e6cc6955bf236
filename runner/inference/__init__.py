"""Use of trained models and data without training: chat, evaluate, inspect rows.

Imports engine, tracking, data, models and common; not hydra.
"""
