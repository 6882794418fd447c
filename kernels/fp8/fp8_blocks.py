"""Constants of the blocks of fp8 products, in a module without torch, so that recipes are checked without it."""

BLOCK = 128
"""Elements along a contraction that share a scale."""
SMALLEST = 2.0**-100
"""The least value that counts as a block's largest absolute value, so that no scale is 0."""
