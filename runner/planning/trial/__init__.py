"""The first steps of a planned run, really run in a child process: `process` is that process, `start` starts it."""
