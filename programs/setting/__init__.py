"""What stands before a graph is captured: model, mesh, names of dims, annotations, layers that are alike."""
