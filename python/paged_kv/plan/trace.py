"""Lengths of real requests, and what they would hold under several ways to reserve memory."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paged_kv.plan.errors import TraceError
from paged_kv.plan.pages import sum_of_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from paged_kv.plan.shape import ElementType, ModelShape

# Names of the two lengths in public traces: ours, Azure's, Mooncake's, and what OpenAI's API calls them.
COLUMNS = (
    ("prompt", "answer"),
    ("ContextTokens", "GeneratedTokens"),
    ("input_length", "output_length"),
    ("prompt_tokens", "completion_tokens"),
)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the requests of a trace hold under one way to reserve memory.

    Attributes
    ----------
    name : str
        The way.
    page_size : int, optional
        Tokens of a page; None where memory is contiguous.
    mean_bytes : float
        Bytes that a request holds, averaged over the steps of all requests.
    waste : float
        Share of these bytes that hold no token which is still seen.
    """

    name: str
    page_size: int | None
    mean_bytes: float
    waste: float

    def requests(self, budget: int) -> int:
        """Count the requests that a budget of bytes holds at once, on average."""
        return int(budget / self.mean_bytes)


def load_trace(path: Path) -> list[tuple[int, int]]:
    """Read the lengths of requests.

    Parameters
    ----------
    path : Path
        A CSV file with a header, or JSON lines (``.jsonl``). The lengths are in columns or keys named
        ``prompt`` and ``answer``, ``ContextTokens`` and ``GeneratedTokens``, ``input_length`` and
        ``output_length``, or ``prompt_tokens`` and ``completion_tokens``; others are ignored.

    Returns
    -------
    list of (int, int)
        Tokens of the prompt (at least 1) and of the answer (at least 0) of each request.

    Raises
    ------
    TraceError
        For a file that can't be read, lacks the lengths, or holds no request; with the line.
    """
    read = _json_lines if path.suffix in (".jsonl", ".ndjson") else _csv_rows
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            requests = [_lengths(row, path, line) for line, row in read(file, path)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"trace {path} can't be read: {error}") from None
    if not requests:
        raise TraceError(f"trace {path} has no request")
    return requests


def _csv_rows(file: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    del path
    rows = csv.DictReader(file, strict=True)
    for row in rows:
        yield rows.line_num, row


def _json_lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # also a number of thousands of digits
            raise TraceError(f"trace {path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise TraceError(f"trace {path}, line {number}: not an object")
        yield number, row


def _lengths(row: dict[str, Any], path: Path, line: int) -> tuple[int, int]:
    for prompt, answer in COLUMNS:
        if prompt in row and answer in row:
            return (
                _number(row[prompt], prompt, 1, path, line),
                _number(row[answer], answer, 0, path, line),
            )
    wanted = " or ".join(f"{prompt} and {answer}" for prompt, answer in COLUMNS)
    raise TraceError(f"trace {path}, line {line}: no lengths; name them {wanted}")


def _number(value: object, name: str, least: int, path: Path, line: int) -> int:
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise TraceError(f"trace {path}, line {line}: {name} is {value!r}, expected an integer >= {least}")
    return number


def compare(
    shape: ModelShape,
    dtype: ElementType,
    requests: Iterable[tuple[int, int]],
    *,
    page_sizes: Sequence[int],
    context_length: int | None = None,
) -> list[Reservation]:
    """Compare contiguous reservation with pages on the lengths of real requests.

    Parameters
    ----------
    shape : ModelShape
        The model.
    dtype : ElementType
        How keys and values are stored.
    requests : iterable of (int, int)
        Tokens of prompt and answer of each.
    page_sizes : sequence of int
        Tokens of a page, each of which to look at.
    context_length : int, optional
        What is reserved where the answer's length isn't known; the model's, if None; the longest
        request's, if that isn't known either.

    Returns
    -------
    list of Reservation
        Three contiguous ways, then one row per page size.

    Raises
    ------
    ValueError
        Without a request, or for a page size below 1.

    Notes
    -----
    The ways are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (SOSP 2023), section 6.1: room for the whole context, for the answer rounded up to a power
    of two, and for the answer exactly, as only an oracle could. A request lives one step for its prompt and
    one for each token of the answer. A layer with a window never reserves more than the window. Nothing is
    shared between requests.
    """
    counted = Counter(requests)
    if not counted:
        raise ValueError("there is no request to compare on")
    longest = max(prompt + answer for prompt, answer in counted)
    context = context_length or shape.context_length or longest
    contiguous: tuple[tuple[str, Callable[[int, int], int]], ...] = (
        ("contiguous, whole context", lambda prompt, answer: max(context, prompt + answer)),
        ("contiguous, power of two", lambda prompt, answer: prompt + _power_of_two(answer)),
        ("contiguous, length foreknown", lambda prompt, answer: prompt + answer),
    )
    steps = sum(count * (answer + 1) for (_, answer), count in counted.items())
    used = _held_by_pages(shape, dtype, counted, 1)
    rows = []
    for name, room in contiguous:
        held = 0
        for group in shape.groups:
            tokens = sum(
                count * (answer + 1) * min(room(prompt, answer), group.window or room(prompt, answer))
                for (prompt, answer), count in counted.items()
            )
            held += tokens * group.bytes_per_token(dtype)
        rows.append(Reservation(name, None, held / steps, 1 - used / held))
    for page_size in page_sizes:
        held = _held_by_pages(shape, dtype, counted, page_size)
        rows.append(Reservation(f"pages of {page_size}", page_size, held / steps, 1 - used / held))
    return rows


def _held_by_pages(
    shape: ModelShape, dtype: ElementType, counted: Counter[tuple[int, int]], page_size: int
) -> int:
    """Add up the bytes of pages over every step of every request."""
    total = 0
    for group in shape.groups:
        pages = sum(
            count * sum_of_pages(prompt, prompt + answer, page_size, group.window)
            for (prompt, answer), count in counted.items()
        )
        total += pages * page_size * group.bytes_per_token(dtype)
    return total


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0
