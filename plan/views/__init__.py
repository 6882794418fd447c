"""A report for the eye: screen, page, pictures and traces."""
