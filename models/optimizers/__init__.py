"""Optimizers: the update of a parameter as a function of its gradient and state."""
