"""The settings of other tools' files, read as text, with their places."""
