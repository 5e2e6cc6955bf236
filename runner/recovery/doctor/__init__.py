"""doctor.py: what is wrong with each file of a run, what resume= would do, and repairs."""
