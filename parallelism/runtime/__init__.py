"""Processes, process groups and the execution of a Program."""
