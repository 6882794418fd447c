"""Searching meshes, batches and recomputation for the fastest that fits, and suggestions."""
