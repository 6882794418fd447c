"""Classes of transformers, with operations that can be traced and served in place of their own."""
