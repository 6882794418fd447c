"""Attention: over whole sequences, in blocks, and over pages of a cache."""
