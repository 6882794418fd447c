"""The command `train`: training loop, text, checkpoints and records."""
