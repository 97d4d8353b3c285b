"""How many requests fit in a budget of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_kv.plan.pages import most_pages

if TYPE_CHECKING:
    from paged_kv.plan.shape import ElementType, ModelShape


@dataclass(frozen=True, slots=True)
class Fit:
    """Requests of one length in a budget.

    Attributes
    ----------
    length : int
        Tokens of each request, prompt and answer.
    requests : int
        How many fit at once, each at its largest.
    pages : tuple of int
        Pages of each group's cache that these requests take.
    request_bytes : int
        Bytes that one of them takes at its largest.
    """

    length: int
    requests: int
    pages: tuple[int, ...]
    request_bytes: int


def request_bytes(shape: ModelShape, dtype: ElementType, page_size: int, length: int) -> int:
    """Count the bytes of the pages that a request takes at its largest.

    Parameters
    ----------
    shape : ModelShape
        The model.
    dtype : ElementType
        How keys and values are stored.
    page_size : int
        Tokens of a page.
    length : int
        Tokens to which the request grows.

    Returns
    -------
    int
        Bytes of whole pages in all layers.
    """
    return sum(
        most_pages(length, page_size, group.window) * page_size * group.bytes_per_token(dtype)
        for group in shape.groups
    )


def fit(shape: ModelShape, dtype: ElementType, page_size: int, length: int, budget: int) -> Fit:
    """Count the requests of one length that fit in a budget, nothing shared between them.

    Parameters
    ----------
    shape, dtype, page_size, length
        As in :func:`request_bytes`.
    budget : int
        Bytes for pages.

    Returns
    -------
    Fit
        Requests, and the pages they take of each group's cache.
    """
    size = request_bytes(shape, dtype, page_size, length)
    requests = budget // size
    pages = tuple(requests * most_pages(length, page_size, group.window) for group in shape.groups)
    return Fit(length, requests, pages, size)
