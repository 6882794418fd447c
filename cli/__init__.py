"""The door: one Typer app, one small file per command; parses, calls, prints."""
