"""Parts of a run that `runner.engine.build` puts together, and what the log says of them."""
