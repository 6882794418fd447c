"""Whether a model fits a mesh, from plain numbers, without torch."""
