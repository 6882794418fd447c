"""A plan's report: what goes where, what is sent, memory and time, as plain rows."""
