"""Why a plan can't be made, as types."""

from __future__ import annotations


class ConfigError(ValueError):
    """A model's config can't be read, or describes something that can't be planned.

    Parameters
    ----------
    feature : str
        Name of what is missing or unsupported: a key of the config, with its value where that is the
        trouble.
    why : str
        What is wrong with it.

    Attributes
    ----------
    feature : str
        The name as given.
    """

    def __init__(self, feature: str, why: str) -> None:
        super().__init__(f"config: {feature}: {why}")
        self.feature = feature


class TraceError(ValueError):
    """A file of request lengths can't be read; the message names the line."""
