"""Quantizing a model's layers one after another."""
