"""What ``--telemetry`` does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paged_kv.telemetry import Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paged_kv import KvCache


@contextmanager
def publishing(cache: KvCache, path: Path | None, label: str) -> Iterator[None]:
    """Publish a cache, open batches included, while the block runs; do nothing without a path.

    Parameters
    ----------
    cache : KvCache
        The cache.
    path : Path, optional
        The file.
    label : str
        What to call the program.

    Raises
    ------
    OSError
        Where the file can't be written.
    """
    if path is None:
        yield
        return
    cache.track_leases()
    with Publisher(cache, path, label=label):
        yield
