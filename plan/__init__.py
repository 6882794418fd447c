"""The command `plan`: pricing, report, pictures and search; and the measurements of `doctor --measure`."""
