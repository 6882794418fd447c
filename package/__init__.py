"""tpshard: training and serving transformers on more than one device, from a recipe."""

__version__: str


def __getattr__(name: str) -> str:
    """Computes `__version__` on first use, so that importing the package stays fast."""
    if name != "__version__":
        raise AttributeError(f"module 'tpshard' has no attribute {name!r}")
    from tpshard.cli.main import version

    return version()
