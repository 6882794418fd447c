"""From a function to a graph: recording the ops that it runs, and rewriting them into a canonical form."""
