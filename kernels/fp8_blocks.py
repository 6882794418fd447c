"""The blocks of fp8 products, without torch, for those who check a recipe."""

BLOCK = 128
"""Elements along a contraction that share a scale."""
SMALLEST = 2.0**-100
"""Blocks with less are scaled as if this were their largest absolute value, so that no scale is 0."""
