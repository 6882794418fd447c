"""What a server's next step computes: requests, their blocks of the cache, and whose turn it is."""
