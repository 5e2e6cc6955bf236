"""export.py: a trained model as files for other programs."""
