"""Rules: one per op, as a table of factors."""
