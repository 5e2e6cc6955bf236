"""Choices of kernels on the CPU."""
