"""report.html of a single run: charts, samples, data, settings, checkpoints and attempts in one file."""
