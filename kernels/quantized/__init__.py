"""GPTQ: its format, its solver, and products with packed weights."""
