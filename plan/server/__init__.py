"""Prices of a server: its steps, traffic, and a rehearsal of requests."""
