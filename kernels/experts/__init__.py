"""Products of experts: each token with the weights of the experts that it goes to."""
