"""Pipelines: cutting a program into stages, their schedules, and running them."""
