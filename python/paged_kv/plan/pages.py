"""How many pages a sequence holds, in closed form.

A layer that sees the last W tokens needs, at length n, the pages that hold any of the tokens n - W to n - 1.
They needn't begin at a page's first slot, so a window of W tokens touches up to ceil((W - 1) / P) + 1 pages
of P tokens.
"""

from __future__ import annotations


def pages_held(length: int, page_size: int, window: int | None = None) -> int:
    """Count the pages that a sequence needs at one length.

    Parameters
    ----------
    length : int
        Tokens of the sequence, the one being computed included.
    page_size : int
        Tokens of a page.
    window : int, optional
        Tokens that a query sees, itself included; pages before them are given back. None for all.

    Returns
    -------
    int
        Pages with at least one token that the last query sees.

    Raises
    ------
    ValueError
        For a page size or a window below 1.
    """
    _check(page_size, window)
    dropped = 0 if window is None else max(0, length - window) // page_size
    return -(-length // page_size) - dropped


def most_pages(length: int, page_size: int, window: int | None = None) -> int:
    """Count the pages that a sequence needs at most while it grows to `length`, one token at a time.

    Parameters
    ----------
    length, page_size, window
        As in :func:`pages_held`.

    Returns
    -------
    int
        The largest of ``pages_held(n)`` for n up to `length`.
    """
    _check(page_size, window)
    if window is not None:
        # The most is touched when the window begins at a page's last slot.
        length = min(length, window + page_size - 1)
    return -(-length // page_size)


def sum_of_pages(first: int, last: int, page_size: int, window: int | None = None) -> int:
    """Add up the pages that a sequence needs at each length from `first` to `last`.

    Parameters
    ----------
    first, last : int
        The lengths, both included.
    page_size, window
        As in :func:`pages_held`.

    Returns
    -------
    int
        The sum of ``pages_held(n)``; with ``page_size=1``, of the tokens that are seen.
    """
    _check(page_size, window)
    return _sum_to(last, page_size, window) - _sum_to(first - 1, page_size, window)


def _check(page_size: int, window: int | None) -> None:
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}, expected at least 1")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, expected at least 1")


def _sum_to(length: int, page_size: int, window: int | None) -> int:
    whole, rest = divmod(length, page_size)
    held = page_size * whole * (whole + 1) // 2 + rest * (whole + 1)
    if window is None or length <= window:
        return held
    whole, rest = divmod(length - window, page_size)
    return held - (page_size * whole * (whole - 1) // 2 + whole * (rest + 1))
