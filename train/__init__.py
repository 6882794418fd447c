"""The verb `train`: loop, text, optimizer, checkpoints, records."""
