"""A step run on every device in lockstep, and compared with one device."""
