"""Tasks of lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model of this program."""
