"""Kernels of the CPU that a long run chooses by measuring them at its start."""
