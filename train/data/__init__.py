"""Data: documents, tokens, packed rows and batches, the same on every mesh."""
