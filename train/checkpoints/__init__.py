"""Checkpoints: saved in the background, whole or absent, and restored onto any mesh."""
