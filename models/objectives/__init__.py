"""Tasks: what a batch is, and the loss of a model on it."""
