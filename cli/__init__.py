"""The command line: one Typer app, with one small file per command that parses, calls and prints."""
