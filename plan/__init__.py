"""The verb `plan`: pricing, report, pictures, search, and what `doctor --measure` fits."""
