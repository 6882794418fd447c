"""Questions about a plan: why, what else, what if, and how it compares with a run."""
