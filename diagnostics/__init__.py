"""What is said to a user: diagnostics with their places in a file, and exit codes."""
