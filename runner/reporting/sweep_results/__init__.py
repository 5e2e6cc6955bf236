"""Results of a sweep: records of its jobs read from disk, aggregated over seeds, and written as a leaderboard."""
