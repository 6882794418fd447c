"""From a few annotations to a sharding of every value."""
