"""A whole training step: plain, of few layers for many, or staged."""
