"""The package imports and says which version it is."""

from importlib.metadata import version

import paged_kv


def test_version_is_the_installed_one() -> None:
    assert paged_kv.__version__ == version("paged-kv")
