"""The programs of a step, with the passes that run over them."""
