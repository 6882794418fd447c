"""The command `serve`: engine, KV cache and HTTP server."""
