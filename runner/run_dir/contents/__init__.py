"""What a run directory has: names of its files, fields of run.json, and where a run comes from."""
