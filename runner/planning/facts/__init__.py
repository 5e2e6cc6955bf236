"""What is known of a run before it trains: its model, its data, and this machine."""
