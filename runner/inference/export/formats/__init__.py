"""Formats of export.py: each module writes the files into a folder and returns a function that compares them and says
what it found.
"""
