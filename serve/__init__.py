"""The verb `serve`: engine, cache, HTTP."""
