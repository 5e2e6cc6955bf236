"""Who holds a file or folder: the identity of processes, and locks by owner files."""
