"""A recipe's text: nodes with their places, interpolations, sections, and writing it back."""
