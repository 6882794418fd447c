"""Checks of a recipe before anything is built: its own constraints, whether model and mesh fit, its text."""
