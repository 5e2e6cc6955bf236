"""Every run and sweep under a folder: found by their run.json and sweep.json, listed, and drawn with what they began
from.
"""
