"""The package imports and says which version it is."""

import sysconfig
from importlib.metadata import version

import pytest

import paged_kv
from paged_kv import _core


def test_version_is_the_installed_one() -> None:
    assert paged_kv.__version__ == version("paged-kv")


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="free-threaded Pythons have no stable ABI yet"
)
def test_field_c76_the_extension_is_built_for_the_stable_abi() -> None:
    # A build that finds another interpreter falls back to one version without saying so.
    assert str(_core.__file__).endswith(".abi3.so")
