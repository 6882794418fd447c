"""Families: decoders of our own, and what a family's config.json says of them."""
