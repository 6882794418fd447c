"""Files that appear whole or not at all, locks that a process holds, and JSON and tensors read within bounds."""
