"""Limits on what files of another can make this program do: parsers of JSON and YAML, memory.

Imports the standard library, and yaml inside functions.
"""
