"""The HTTP server: fields, templates, access, preprocessing and answers."""
