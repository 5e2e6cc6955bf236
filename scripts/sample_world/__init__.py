"""Generator of the sample data in data/samples: a small invented world in English and Chinese."""
