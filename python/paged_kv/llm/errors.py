"""What can go wrong before a model runs, as types."""

from __future__ import annotations


class ModelError(RuntimeError):
    """A model file can't be had, can't be read, or can't be run."""


class DownloadError(ModelError):
    """The reference model could not be downloaded; the message says what to do without a network."""


class UnsupportedModelError(ModelError):
    """The model needs something that this runner does not have.

    Parameters
    ----------
    feature : str
        Name of what is missing, for example ``"architecture 'qwen2'"``.
    hint : str, optional
        What is supported instead.

    Attributes
    ----------
    feature : str
        The name as given.
    """

    def __init__(self, feature: str, hint: str = "") -> None:
        super().__init__(f"unsupported model: {feature}" + (f" ({hint})" if hint else ""))
        self.feature = feature
