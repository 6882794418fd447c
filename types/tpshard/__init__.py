"""tpshard: training and serving transformers on more than one device, from a recipe."""

__version__: str


def __getattr__(name: str) -> str:
    """`__version__`, looked up when it is asked for: nothing else here needs it."""
    if name != "__version__":
        raise AttributeError(f"module 'tpshard' has no attribute {name!r}")
    from tpshard.cli.main import version

    return version()
