"""Every exception that the package raises besides plain ``ValueError`` and ``TypeError``.

An error is raised before anything is changed: whoever catches one may retry with other arguments,
or wait, without repairing anything first. Each carries the numbers that explain it as attributes,
and survives pickling with them.
"""

__all__ = [
    "CacheMemoryError",
    "CorruptionError",
    "DeviceError",
    "InvalidPageError",
    "LayoutError",
    "NeverFitsError",
    "NotQuiescentError",
    "OutOfPagesError",
    "PagedKvError",
    "RefCountError",
    "SequenceBusyError",
    "SequenceFreedError",
]


class PagedKvError(Exception):
    """Base of all errors of this package."""

    def __init__(self, message: str = "", /, **attributes: object) -> None:
        super().__init__(message)
        self.__dict__.update(attributes)


class OutOfPagesError(PagedKvError, MemoryError):
    """Too few pages were available at one instant during the call; waiting or preempting helps.

    Attributes
    ----------
    requested : int
        Pages that the whole call needed.
    free : int
        Pages that were free.
    evictable : int
        Pages that hold a cached prefix nobody uses and could be evicted.
    deferred : int
        Pages that only leases still hold: they come back when the leases end.
    index : int or None
        Position in the batch of the first sequence that did not fit.
    """

    requested: int = 0
    free: int = 0
    evictable: int = 0
    deferred: int = 0
    index: int | None = None


class NeverFitsError(PagedKvError, ValueError):
    """One request or sequence is larger than the whole pool: neither waiting nor preempting helps.

    It is deliberately no ``MemoryError``, so that a loop which preempts and retries when memory
    is short does not spin on it.

    Attributes
    ----------
    requested : int
        Pages requested.
    total : int
        Pages in the pool.
    index : int or None
        Position in the batch of the sequence that is too long.
    """

    requested: int = 0
    total: int = 0
    index: int | None = None


class SequenceBusyError(PagedKvError):
    """Another thread is changing the sequence, or an open batch holds it.

    Attributes
    ----------
    sequence : int
        The sequence's number.
    index : int or None
        Its position in the batch.
    """

    sequence: int = 0
    index: int | None = None


class SequenceFreedError(PagedKvError):
    """The sequence was freed.

    Attributes
    ----------
    indices : list of int
        Positions in the batch of all sequences that were freed; empty outside a batch.
    """

    indices: list[int]

    def __init__(self, message: str = "", /, *, indices: list[int] | None = None) -> None:
        super().__init__(message, indices=indices or [])


class RefCountError(PagedKvError):
    """A reference count would go below zero or above its maximum, or the handle is stale.

    Attributes
    ----------
    page : int
        The page.
    ref_count : int
        Its count when the operation was refused.
    """

    page: int = 0
    ref_count: int = 0


class InvalidPageError(PagedKvError):
    """A page number outside the pool, or a handle of another pool.

    Attributes
    ----------
    page : int
        The number given.
    num_pages : int
        Pages in the pool.
    """

    page: int = 0
    num_pages: int = 0


class LayoutError(PagedKvError, ValueError):
    """A shape, stride, dtype, device or size that doesn't fit."""


class CorruptionError(PagedKvError):
    """``validate()`` found the structure inconsistent."""


class NotQuiescentError(PagedKvError):
    """``validate()`` can't judge, because something ran meanwhile."""


class CacheMemoryError(PagedKvError, MemoryError):
    """The memory of a cache could not be had.

    Attributes
    ----------
    bytes : int
        Bytes asked for.
    """

    bytes: int = 0


class DeviceError(PagedKvError):
    """A device refused an operation.

    Attributes
    ----------
    code : int
        The device runtime's error code.
    name : str
        The code's name.
    message : str
        What the runtime said.
    hint : str
        What usually helps.
    """

    code: int = 0
    name: str = ""
    message: str = ""
    hint: str = ""
