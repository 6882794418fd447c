"""A training run: its folder, its loop, and the engine that runs a step's programs."""
