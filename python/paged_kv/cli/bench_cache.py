"""``paged-kv bench cache``: what the cache's bookkeeping costs, as a Python program sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv import KvCache, Sequence, _core, kv_bytes_per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE_SIZE = 16
PREFILL_CHUNK = 32 * PAGE_SIZE
STREAM_BYTES = 512 << 20
CACHE_LINE = 64
WARM_UPS = 4
# What a step can't do without: the Python object, the sequence's state, its table's, its last page's.
LINES_PER_SEQUENCE = 4
# More than a repetition appends to one sequence, in pages.
ROOM = 16

US = "paged_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something to time.

    Attributes
    ----------
    name, impl : str
        What is done, and by whom.
    work : callable
        ``work(n)`` does it `n` times.
    operations : int
        `n` of one repetition.
    prepare : callable, optional
        Called before each repetition, not timed.
    parts : int
        What one operation is divided by: sequences or pages.
    unit : str
        Nanoseconds per what.
    yardstick : Case, optional
        Timed in the same run; the limit of what can be reached.
    """

    name: str
    impl: str = US
    work: Callable[[int], object]
    operations: int
    prepare: Callable[[], object] | None = None
    parts: int = 1
    unit: str
    yardstick: Case | None = None


def bench_cache(repetitions: int, *, stream_bytes: int = STREAM_BYTES) -> list[dict[str, Any]]:
    """Measure a decode step's bookkeeping, the block table, fork and copy-on-write.

    Parameters
    ----------
    repetitions : int
        Of each case; all cases take turns.
    stream_bytes : int
        Read and written before a step that finds the processor's caches cold.

    Returns
    -------
    list of dict
        As `paged_kv._core.bench_pool` returns it.
    """
    cases = list(all_cases(stream_bytes))
    figures = _core.bench_cases([(c.operations, c.prepare, c.work) for c in cases], repetitions)
    for case, figure in zip(cases, figures, strict=True):
        figure.update({key: figure[key] / case.parts for key in ("value", "low", "high")})
    median = {id(case): figure["value"] for case, figure in zip(cases, figures, strict=True)}
    rows = []
    for case, figure in zip(cases, figures, strict=True):
        yardstick = case.yardstick or case
        limit = median[id(yardstick)]
        about = {"bench": "cache", "case": case.name, "impl": case.impl, "threads": 1, "unit": case.unit}
        beside = {
            "yardstick": yardstick.impl if yardstick.impl != US else yardstick.name,
            "limit": limit,
            "ratio": figure["value"] / limit,
        }
        rows.append(about | figure | beside)
    return rows


def all_cases(stream_bytes: int) -> Iterator[Case]:
    """Yield every case, each behind its yardstick."""
    pair = Case(
        name="what one sequence's claim costs at least",
        impl="compare-exchange pair",
        work=_core.compare_exchange_pairs,
        operations=10_000,
        unit="ns",
    )
    yield pair
    yield from decode_steps(pair)
    yield from block_tables(num_sequences=256, num_pages=512)
    yield fork(pair)
    yield from copy_on_write()
    yield from cold_steps(stream_bytes)


class Decoding:
    """Sequences of a tables-only cache in the middle of their answers.

    Parameters
    ----------
    num_sequences : int
        Sequences of a batch.
    num_pages : int
        Pages of each, the last of them taken in these steps. The lengths differ, so that every step
        takes a page for every sixteenth sequence.
    """

    def __init__(self, num_sequences: int, num_pages: int) -> None:
        self.cache = KvCache(num_layers=0, page_size=PAGE_SIZE, num_pages=num_sequences * (num_pages + ROOM))
        self.seqs: list[Sequence] = [self.cache.sequence() for _ in range(num_sequences)]
        self.lengths = [(num_pages - 1) * PAGE_SIZE - i % PAGE_SIZE for i in range(num_sequences)]
        # A chunk of each in turn, as continuous batching computes long prompts.
        for done in range(0, num_pages * PAGE_SIZE, PREFILL_CHUNK):
            chunk = [min(max(length - done, 0), PREFILL_CHUNK) for length in self.lengths]
            self.cache.batch(self.seqs, chunk).commit()

    def step(self, n: int) -> None:
        """Decode `n` tokens of every sequence."""
        batch, seqs = self.cache.batch, self.seqs
        for _ in range(n):
            batch(seqs, 1).commit()

    def step_with_slots(self, n: int) -> None:
        """Decode as `step` does, and ask where the new tokens lie."""
        batch, seqs = self.cache.batch, self.seqs
        for _ in range(n):
            step = batch(seqs, 1)
            step.slot_mapping  # noqa: B018
            step.commit()

    def rewind(self) -> None:
        """Go back to the start, and take one step so that the processor's caches know all of it."""
        for seq, length in zip(self.seqs, self.lengths, strict=True):
            seq.truncate(length)
        self.step(1)


def decode_step(what: str, decoding: Decoding, yardstick: Case) -> Case:
    """Build the case of steps of one batch, many at once."""
    num_sequences = len(decoding.seqs)
    return Case(
        name=f"decode step, batch {num_sequences}, {what}",
        work=decoding.step,
        operations=64 if num_sequences == 1 else 16,
        prepare=decoding.rewind,
        parts=num_sequences,
        unit="ns/sequence",
        yardstick=yardstick,
    )


def decode_steps(pair: Case) -> Iterator[Case]:
    """Yield steps of several batch sizes, of short and long sequences."""
    for num_sequences in (1, 64):
        yield decode_step("8 pages each", Decoding(num_sequences, 8), pair)
    short, long = Decoding(256, 8), Decoding(256, 8192)
    yield (warm := decode_step("8 pages each", short, pair))
    yield decode_step("8192 pages each", long, warm)
    yield replace(decode_step("with slot_mapping", short, pair), work=short.step_with_slots)


def cold_steps(stream_bytes: int) -> Iterator[Case]:
    """Yield a step that finds none of its memory in the processor's caches.

    Beside a large batch stand a batch of one, which is what code costs that was evicted, too, the smallest
    call of a library that is as widely used, and a plain loop over as many cache lines.
    """
    stream = np.zeros(stream_bytes // 8, np.int64)
    after = f"after streaming {stream_bytes >> 20} MiB"

    def evict() -> None:
        np.add(stream, 1, out=stream)

    num_sequences = 256
    lines = bytes(num_sequences * LINES_PER_SEQUENCE * CACHE_LINE)
    reading = Case(
        name=f"{LINES_PER_SEQUENCE} cache lines per sequence, {after}",
        impl="read",
        work=lambda n: _core.read_lines(lines, n),
        operations=1,
        prepare=evict,
        parts=num_sequences,
        unit="ns/sequence",
    )
    yield reading
    few = np.ones(4)

    def add(n: int) -> None:
        for _ in range(n):
            np.add(few, few)

    yield Case(
        name=f"sum of two arrays of 4, {after}",
        impl="numpy",
        work=add,
        operations=1,
        prepare=evict,
        unit="ns",
        yardstick=reading,
    )
    for decoding in (Decoding(1, 8), Decoding(num_sequences, 8)):

        def rewind_and_evict(decoding: Decoding = decoding) -> None:
            decoding.rewind()
            evict()

        yield replace(decode_step(after, decoding, reading), operations=1, prepare=rewind_and_evict)


def block_tables(num_sequences: int, num_pages: int) -> Iterator[Case]:
    """Yield the block table, as a new array and into a buffer, behind a copy of as many bytes."""
    decoding = Decoding(num_sequences, num_pages)
    source = np.ones((num_sequences, num_pages), np.int32)
    buffer = np.empty_like(source)
    batch = decoding.cache.batch(decoding.seqs, 0)

    def copy(n: int) -> None:
        for _ in range(n):
            np.copyto(buffer, source)

    def build(n: int) -> None:
        for _ in range(n):
            batch.block_table  # noqa: B018

    def fill(n: int) -> None:
        for _ in range(n):
            batch.fill(block_table=buffer)

    def reopen() -> None:
        nonlocal batch
        batch = decoding.cache.batch(decoding.seqs, 0)

    def renewed(work: Callable[[int], None]) -> Callable[[], None]:
        def prepare() -> None:
            for _ in range(WARM_UPS):
                work(1)
                reopen()

        return prepare

    shape = f"[{num_sequences}, {num_pages}]"
    # A table is built once in a batch, so each is done once, after the same number of times.
    memcpy = Case(
        name=f"as many bytes as a block table {shape}",
        impl="memcpy",
        work=copy,
        operations=1,
        prepare=lambda: copy(WARM_UPS),
        unit="ns/table",
    )
    yield memcpy
    yield Case(
        name=f"block table {shape}",
        work=build,
        operations=1,
        prepare=renewed(build),
        unit="ns/table",
        yardstick=memcpy,
    )
    yield Case(
        name=f"block table {shape} into a buffer",
        work=fill,
        operations=1,
        prepare=renewed(fill),
        unit="ns/table",
        yardstick=memcpy,
    )


def fork(pair: Case) -> Case:
    """Forks of a long sequence, all alive at once."""
    num_tokens = 128 << 10
    cache = KvCache(num_layers=0, page_size=PAGE_SIZE, num_pages=num_tokens // PAGE_SIZE)
    parent = cache.sequence()
    cache.batch([parent], num_tokens).commit()
    children: list[Sequence] = []

    def work(n: int) -> None:
        children.extend([parent.fork() for _ in range(n)])

    return Case(
        name=f"fork of {num_tokens} tokens ({num_tokens // PAGE_SIZE} pages)",
        work=work,
        operations=32,
        prepare=children.clear,
        unit="ns/fork",
        yardstick=pair,
    )


def copy_on_write() -> Iterator[Case]:
    """Yield the copy of a shared page at the first write into it, behind a copy of as many bytes."""
    num_children, tokens = 16, PAGE_SIZE - 1
    num_layers, num_kv_heads, head_dim = 8, 8, 128
    cache = KvCache(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
        page_size=PAGE_SIZE,
        num_pages=2 * num_children,
    )
    parent = cache.sequence()
    cache.batch([parent], tokens).commit()
    children = [parent.fork() for _ in range(num_children)]
    page_bytes = tokens * kv_bytes_per_token(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16"
    )
    source = np.ones(page_bytes, np.uint8)
    buffers = np.ones((num_children, page_bytes), np.uint8)

    def copy(n: int) -> None:
        for _ in range(n):
            for buffer in buffers:
                np.copyto(buffer, source)

    def work(n: int) -> None:
        for _ in range(n):
            cache.batch(children, 1).close()

    memcpy = Case(
        name=f"as many bytes ({page_bytes >> 10} KiB)",
        impl="memcpy",
        work=copy,
        operations=1,
        parts=num_children,
        unit="ns/page",
    )
    yield memcpy
    yield Case(
        name=f"copy on write, {tokens} of {PAGE_SIZE} tokens ({page_bytes >> 10} KiB)",
        work=work,
        operations=1,
        parts=num_children,
        unit="ns/page",
        yardstick=memcpy,
    )
