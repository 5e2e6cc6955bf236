"""Kernels of the CPU that a long run chooses by timing them at its start."""
