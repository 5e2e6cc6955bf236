"""What a run prints: a bar on a terminal, plain lines, JSON lines, or nothing; and the layout of its header and end."""
