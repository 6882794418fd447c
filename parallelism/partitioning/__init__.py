"""From a sharded graph to one device's program."""
