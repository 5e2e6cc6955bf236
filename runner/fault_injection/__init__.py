"""faults.py: break a training command in many ways, continue it as a user would, and compare the result with an
undisturbed run.
"""
