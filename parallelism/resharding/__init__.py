"""From one layout to another: the collectives between them, chosen and emitted."""
