"""Output of a run: metrics.jsonl, samples.jsonl, train.log, the console and external trackers.

Imports common/ only.
"""
