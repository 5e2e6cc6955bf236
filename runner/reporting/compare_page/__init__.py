"""Several runs side by side: their curves, losses, and the settings and data that differ."""
