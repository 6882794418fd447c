"""Recipes: the typed schema, the loader that reports file:line:col, and the shipped YAML files, all without torch."""
