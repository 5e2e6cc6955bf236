"""Kernels in C++ for x86 CPUs, compiled on the machine that uses them.

Imports torch and models.layers.ops only.
"""
