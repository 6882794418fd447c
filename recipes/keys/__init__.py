"""The keys of a recipe: a class per section, with its limits, and laws between sections."""
