"""The extension module behind the package ``paged_kv``."""

__all__ = ["__version__"]

__version__: str
