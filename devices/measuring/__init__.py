"""Measuring this machine: its products, memory, collectives and kernels."""
