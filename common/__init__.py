"""Errors, exit codes, paths, atomic files and locks.

Standard library only; every package may import it, it imports no other package.
"""
