"""Snapshots of a cache for other programs to look at: taken, published, read, compared.

A snapshot is plain data, at most a few hundred KiB as JSON however large the cache is. Publishing
replaces a file in one step, so a reader sees a whole snapshot or the one before, needs no connection
to the program, and can't disturb it::

    with telemetry.Publisher(cache, "/run/user/1000/my-server.json"):
        serve()

``paged-kv map FILE`` draws what is published there.
"""

from paged_kv.telemetry.publisher import DEFAULT_INTERVAL, Publisher, read, write
from paged_kv.telemetry.snapshots import MAX_CELLS, MAX_SEQUENCES, Cells, Rates, Snapshot, rates, snapshot

__all__ = [
    "DEFAULT_INTERVAL",
    "MAX_CELLS",
    "MAX_SEQUENCES",
    "Cells",
    "Publisher",
    "Rates",
    "Snapshot",
    "rates",
    "read",
    "snapshot",
    "write",
]
