"""Chat templates are programs: a sandbox for them, a process with limits that renders them, and the versions of stock
templates for training.
"""
