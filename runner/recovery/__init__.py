"""What is left of a run directory: one finding per file, and how a run continues from what is proven."""
