"""From a recipe's file and overrides to a checked value."""
