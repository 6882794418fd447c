"""What a user writes: typed schema, loader with file:line:col, the shipped YAMLs. Never imports torch."""
