"""Prices of a training step: time, memory, and what waits for what."""
