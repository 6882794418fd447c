"""The runtime: worker processes, process groups, and the execution of a Program."""
