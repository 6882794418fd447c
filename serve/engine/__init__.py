"""The engine: batches of requests through the server's programs on every rank."""
