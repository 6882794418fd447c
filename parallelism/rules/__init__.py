"""Sharding rules: one entry per op, in a table with a file for each theme."""
