"""What can be done with a trained model: open it, talk to it, score it."""
