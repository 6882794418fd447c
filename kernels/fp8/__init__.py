"""Products in fp8, scaled by blocks."""
