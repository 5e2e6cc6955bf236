"""report.html of a sweep: leaderboard and curves of all jobs in one file."""
