"""What stands in the place of a target. Needs no torch."""

IGNORE = -100
"""The target of a position where nothing is predicted."""
