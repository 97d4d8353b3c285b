"""A cache on a device whose streams are late: no page is reused, and nothing read, too early."""

from __future__ import annotations

import gc
import random
import threading
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

import paged_kv
from ascend_device import (
    DIM,
    HEADS,
    KV_HEADS,
    append,
    device_cache,
    empty_pool,
    host_cache,
    read,
    rows,
    settle,
    write,
)
from paged_kv import ascend

if TYPE_CHECKING:
    from ascend_fake import Fake


class Model:
    """Sequences on a device beside what each of their tokens' keys is; every key is a number of its own."""

    def __init__(self, cache: paged_kv.KvCache, seed: int) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.sequences: list[tuple[paged_kv.Sequence, list[int]]] = [(cache.sequence(), [])]
        self.next = 1

    def key(self, numbers: list[int]) -> Any:
        """Keys [tokens, KV_HEADS, DIM] of tokens; float16 has 2048 numbers to tell apart."""
        column = np.array([number % 2048 for number in numbers], np.float16)
        return np.broadcast_to(column[:, None, None], (len(numbers), KV_HEADS, DIM)).copy()

    def step(self, stream: ascend.Stream) -> set[int]:
        """Do something at random; return the pages that a kernel now under way sees."""
        index = self.random.randrange(len(self.sequences))
        sequence, known = self.sequences[index]
        choice = self.random.randrange(6)
        if choice == 0 and len(self.sequences) < 6:
            self.sequences.append((sequence.fork(), known.copy()))
        elif choice == 1:
            left = self.random.randint(0, len(known))
            sequence.truncate(left)
            del known[left:]
        elif choice == 2 and len(self.sequences) > 1:
            self.sequences.pop(index)
            sequence.free()
        else:
            return self.append(sequence, known, self.random.randint(0, 20), stream)
        return set()

    def append(
        self, sequence: paged_kv.Sequence, known: list[int], new: int, stream: ascend.Stream
    ) -> set[int]:
        numbers = list(range(self.next, self.next + new))
        with self.cache.batch([sequence], new, stream=stream) as batch:
            self.next += new
            keys = self.key(numbers)
            self.cache.write(0, keys, -keys, batch)
            pages = set(batch.block_table.ravel().tolist()) | set(batch.copies[:, 0].tolist())
            match self.random.randrange(4):
                case 0:
                    batch.close()
                    keep = 0
                case 1:
                    keep = self.random.randint(0, new)
                    batch.commit([keep])
                case _:
                    keep = new
        known.extend(numbers[:keep])
        return pages if new else set()  # nothing is launched for no token

    def held(self) -> set[int]:
        return {page for sequence, _ in self.sequences for page in sequence.block_table.tolist()}

    def check(self) -> None:
        """Every sequence's keys and values are where its table says."""
        keys, values = self.cache.key_pages(0).numpy(), self.cache.value_pages(0).numpy()
        size = self.cache.page_size
        for sequence, known in self.sequences:
            table = sequence.block_table
            slots = [(table[i // size], i % size) for i in range(len(known))]
            want = self.key(known)
            assert all(np.array_equal(keys[p, :, o], row) for (p, o), row in zip(slots, want, strict=True))
            assert all(np.array_equal(values[p, :, o], -row) for (p, o), row in zip(slots, want, strict=True))


class Late:
    """Streams of which some are held, until the block ends."""

    def __init__(self, fake: Fake, streams: list[ascend.Stream]) -> None:
        self.fake, self.streams = fake, streams
        self.held: list[ascend.Stream] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_through()

    def hold(self, *streams: ascend.Stream) -> None:
        for stream in streams:
            self.fake.hold(stream)
            self.held.append(stream)

    def let_through(self) -> None:
        """Let all streams go, and wait until they have done their work."""
        while self.held:
            self.fake.release(self.held.pop())
        for stream in self.streams:
            stream.synchronize()


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_thousand_steps_while_the_streams_are_held_hand_out_no_page_in_flight(
    fake: Fake, num_streams
) -> None:
    cache = device_cache(num_layers=1, num_pages=48)
    streams = [ascend.Stream(ascend.open_device(0)) for _ in range(num_streams)]
    model = Model(cache, seed=num_streams)
    in_flight: set[int] = set()
    handed_out = short = 0
    with Late(fake, streams) as late:
        late.hold(*streams)
        for _ in range(1000):
            before = model.held()
            try:
                seen = model.step(model.random.choice(streams))
            except paged_kv.OutOfPagesError as error:
                short += error.deferred > 0
                late.let_through()
                assert cache.stats()["deferred_pages"] == 0
                in_flight.clear()
                late.hold(*streams)
                continue
            new = seen - before - {-1}
            handed_out += len(new)
            assert not new & in_flight
            in_flight |= seen
    assert short > 5
    assert handed_out > 200
    model.check()
    for sequence, _ in model.sequences:
        sequence.free()
    assert empty_pool(cache)


def test_steps_on_streams_that_lag_behind_each_other_leave_every_token_in_its_place(fake: Fake) -> None:
    cache = device_cache(num_layers=1, num_pages=48)
    streams = [ascend.Stream(ascend.open_device(0)) for _ in range(3)]
    model = Model(cache, seed=5)
    with Late(fake, streams) as late:
        for i in range(400):
            if i % 8 == 0:
                late.let_through()
                late.hold(model.random.choice(streams))
            try:
                model.step(model.random.choice(streams))
            except paged_kv.OutOfPagesError:
                late.let_through()
            if i % 40 == 39:
                late.let_through()
                model.check()


def test_a_decode_behind_a_prefix_of_a_late_stream_waits_for_it_and_others_do_not(fake: Fake) -> None:
    cache, device = device_cache(), ascend.open_device(0)
    late, fast = ascend.Stream(device), ascend.Stream(device)
    prefix, other = cache.sequence(), cache.sequence()
    append(cache, [other], 4, 50, stream=fast)
    with fake.held(late):
        append(cache, [prefix], 35, 1, stream=late)
        child = prefix.fork()
        append(cache, [other], 1, 51, stream=fast)  # shares nothing
        fast.synchronize()
        append(cache, [child], 1, 2, stream=fast)
        with cache.batch([child], 0, num_queries=1, stream=fast) as batch:
            query, out = (ascend.empty(device, (1, HEADS, DIM), "float16") for _ in range(2))
            query.memory.copy_from(rows(7, 1, HEADS).astype(np.float16))
            cache.attend(0, query, batch, out=out)
        mark = fast.record()
        assert not mark.query()
        assert fake.pending(fast) > 0
    want = device_cache()
    same = want.sequence()
    append(want, [same], 35, 1)
    append(want, [same], 1, 2)
    np.testing.assert_array_equal(out.numpy().astype(np.float32), read(want, same).astype(np.float16))


def test_copies_and_steps_of_another_caches_views_wait_for_late_streams(fake: Fake) -> None:
    """They go to the cache's own stream, and touch pages that other streams are late with."""
    cache, want, device = device_cache(), host_cache(), ascend.open_device(0)
    late = ascend.Stream(device)
    sequence, same = cache.sequence(), want.sequence()
    append(want, [same], 20, 1)
    query, out = (ascend.empty(device, (1, HEADS, DIM), "float16") for _ in range(2))
    query.memory.copy_from(rows(7, 1, HEADS).astype(np.float16))
    with fake.held(late):
        append(cache, [sequence], 20, 1, stream=late)
        with cache.batch([sequence], 0, num_queries=1) as batch:
            make, arguments = batch.__reduce__()
        table = arguments[3]
        cache.copy_pages([(page, 15 - page) for page in table.ravel()])
        cache.attend(0, query, make(*arguments[:3], 15 - table, *arguments[4:]), out=out)
        assert fake.pending(late) > 0
    device.synchronize()
    np.testing.assert_allclose(out.numpy(), read(want, same), rtol=0, atol=4e-3)
    for each in (sequence, same):
        each.free()
    settle(cache)
    assert empty_pool(cache)


def test_a_reader_waits_for_what_was_launched_last_not_for_what_was_begun_last(fake: Fake) -> None:
    """Of two batches of one stream the first goes on after the second has ended."""
    cache, want, device = device_cache(), host_cache(), ascend.open_device(0)
    late, fast = ascend.Stream(device), ascend.Stream(device)
    sequences, same = [[each.sequence() for _ in range(2)] for each in (cache, want)]
    for seed, sequence in enumerate(same):
        append(want, [sequence], 5, 10 * seed)
    query, out = (ascend.empty(device, (2, HEADS, DIM), "float16") for _ in range(2))
    query.memory.copy_from(rows(7, 2, HEADS).astype(np.float16))
    first, second = (cache.batch([sequence], 5, stream=late) for sequence in sequences)
    cache.write(0, rows(0, 5), rows(1000, 5), first)
    with second:
        write(cache, second, 10)
    late.synchronize()
    with fake.held(late):
        with first:
            cache.write(1, rows(1, 5), rows(1001, 5), first)
        with cache.batch(sequences, 0, num_queries=1, stream=fast) as batch:
            cache.attend(1, query, batch, out=out)
        assert not fast.record().query()
    with want.batch(same, 0, num_queries=1) as batch:
        answer = want.attend(1, rows(7, 2, HEADS), batch)
    np.testing.assert_allclose(out.numpy(), answer, rtol=0, atol=4e-3)


def test_a_writer_waits_for_the_readers_of_a_late_stream(fake: Fake) -> None:
    """Written in place, where the kernel that is late still reads."""
    cache, device = device_cache(), ascend.open_device(0)
    late, fast = ascend.Stream(device), ascend.Stream(device)
    sequence = cache.sequence()
    append(cache, [sequence], 10, 1)
    want = read(cache, sequence)
    query, out = (ascend.empty(device, (1, HEADS, DIM), "float16") for _ in range(2))
    query.memory.copy_from(rows(7, 1, HEADS).astype(np.float16))
    with fake.held(late):
        with cache.batch([sequence], 0, num_queries=1, stream=late) as batch:
            cache.attend(0, query, batch, out=out)
        sequence.truncate(3)
        with cache.batch([sequence], 5, stream=fast) as batch:
            assert len(batch.copies) == 0
            write(cache, batch, 77)
    np.testing.assert_allclose(out.numpy()[0], want[0], rtol=0, atol=1e-6)


def test_speculation_on_one_stream_copies_nothing(fake: Fake) -> None:
    cache = device_cache()
    stream = ascend.Stream(ascend.open_device(0))
    sequence = cache.sequence()
    with fake.held(stream):
        append(cache, [sequence], 21, 0, stream=stream)
        for accepted in (1, 3, 0, 2, 4, 1):
            with cache.batch([sequence], 5, stream=stream) as batch:
                assert len(batch.copies) == 0
                write(cache, batch, accepted)
                batch.commit([accepted])
            append(cache, [sequence], 2, 9, stream=stream)
            sequence.truncate(len(sequence) - 1)
        assert cache.stats()["copied_pages"] == 0
        assert len(sequence) == 21 + 11 + 6
    sequence.free()
    stream.synchronize()
    assert empty_pool(cache)


def test_pages_in_flight_count_as_deferred_and_come_back_when_somebody_asks(fake: Fake) -> None:
    cache = device_cache(num_pages=4)
    stream = ascend.Stream(ascend.open_device(0))
    sequence = cache.sequence()
    append(cache, [sequence], 64, 0)
    ascend.open_device(0).synchronize()
    for take in (
        lambda: cache.batch([cache.sequence()], 40),
        lambda: cache.sequence().append(40),
        lambda: cache.sequence().extend(range(40)),
        lambda: cache.pool.release(cache.pool.alloc(3)),
    ):
        sequence.free()
        sequence = cache.sequence()
        with fake.held(stream):
            append(cache, [sequence], 60, 0, stream=stream)
            sequence.free()
            assert cache.stats()["deferred_pages"] == 4
            assert cache.pool.num_free == 0
            with pytest.raises(paged_kv.OutOfPagesError) as error:
                take()
            assert (error.value.free, error.value.deferred) == (0, 4)
        stream.synchronize()
        taken = take()
        if isinstance(taken, paged_kv.Batch):
            taken.close()
        del taken
        gc.collect()
    assert empty_pool(cache)


@pytest.mark.parametrize("end", ["exception", "close", "dropped", "freed first"])
def test_however_a_batch_ends_its_pages_stay_until_its_kernels_have_run(fake: Fake, end) -> None:
    cache = device_cache()
    stream = ascend.Stream(ascend.open_device(0))
    sequence = cache.sequence()
    with fake.held(stream):
        batch = cache.batch([sequence], 20, stream=stream)
        write(cache, batch, 0)
        if end == "freed first":
            sequence.free()
            batch.commit()
        elif end == "exception":
            with pytest.raises(RuntimeError), batch:
                raise RuntimeError
        elif end == "close":
            batch.close()
            batch.close()
        del batch
        gc.collect()
        sequence.free()
        assert cache.stats()["deferred_pages"] == 2
        assert cache.pool.num_free == 14
    stream.synchronize()
    assert cache.pool.num_free == 16


def test_a_batch_that_launched_nothing_leaves_no_lease(fake: Fake) -> None:
    cache = device_cache()
    events = fake.calls("aclrtRecordEvent")
    sequence = cache.sequence()
    with cache.batch([sequence], 5) as batch:
        batch.commit()
    sequence.free()
    assert empty_pool(cache)
    assert fake.calls("aclrtRecordEvent") == events


def test_pages_that_a_wrong_handle_never_got_to_write_come_back(fake: Fake) -> None:
    cache = device_cache(num_pages=4)
    for handle in (12345, 12346):
        sequence = cache.sequence()
        with pytest.raises(paged_kv.DeviceError), cache.batch([sequence], 64, stream=handle) as batch:
            write(cache, batch, 0)
        sequence.free()
        assert cache.stats()["deferred_pages"] == 0
    parent = cache.sequence()
    append(cache, [parent], 5, 0)
    settle(cache)
    child = parent.fork()
    with pytest.raises(paged_kv.DeviceError):
        cache.batch([child], 1, stream=12345)  # copies a page
    for sequence in (parent, child):
        sequence.free()
    settle(cache)
    assert empty_pool(cache)
    fake.clear()


def test_a_launch_that_could_not_wait_for_a_late_stream_waits_when_repeated(fake: Fake) -> None:
    cache, device = device_cache(), ascend.open_device(0)
    late, fast = ascend.Stream(device), ascend.Stream(device)
    sequence = cache.sequence()
    query, out = (ascend.empty(device, (1, HEADS, DIM), "float16") for _ in range(2))
    query.memory.copy_from(rows(7, 1, HEADS).astype(np.float16))
    with fake.held(late):
        append(cache, [sequence], 5, 0, stream=late)
        with cache.batch([sequence], 0, num_queries=1, stream=fast) as batch:
            fake.fail("aclrtStreamWaitEvent", 207001)
            with pytest.raises(paged_kv.DeviceError):
                cache.attend(0, query, batch, out=out)
            cache.attend(0, query, batch, out=out)
        assert not fast.record().query()
    np.testing.assert_allclose(out.numpy(), read(cache, sequence), rtol=0, atol=4e-3)


def test_a_stream_of_somebody_else_by_its_handle(fake: Fake) -> None:
    cache = device_cache()
    foreign = ascend.Stream(ascend.open_device(0))

    class TorchStream:
        npu_stream = foreign.handle

    sequence = cache.sequence()
    with fake.held(foreign):
        append(cache, [sequence], 3, 0, stream=foreign.handle)
        append(cache, [sequence], 3, 1, stream=TorchStream())
        assert fake.pending(foreign) > 4
    got = read(cache, sequence)
    same = cache.sequence()
    append(cache, [same], 3, 0)
    append(cache, [same], 3, 1)
    np.testing.assert_array_equal(got, read(cache, same))


@pytest.mark.usefixtures("fake")
def test_many_threads_each_with_a_stream_and_all_on_one() -> None:
    cache = device_cache(num_layers=1, num_pages=96)
    shared = ascend.Stream(ascend.open_device(0))
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            own = ascend.Stream(ascend.open_device(0))
            model = Model(cache, seed)
            for i in range(60):
                try:
                    model.step([own, shared][i % 2])
                except paged_kv.OutOfPagesError:
                    own.synchronize()
                    shared.synchronize()
            model.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    gc.collect()
    settle(cache)
    assert empty_pool(cache)


def test_i11_streams_that_come_and_go_leave_no_memory_behind(fake: Fake) -> None:
    cache = device_cache()
    device, sequence = ascend.open_device(0), cache.sequence()

    def use(count: int) -> tuple[int, int]:
        for seed in range(count):
            stream = ascend.Stream(device)
            append(cache, [sequence], 1, seed, stream=stream)
            sequence.truncate(0)
        del stream
        settle(cache)
        gc.collect()
        settle(cache)
        return fake.memory_used(), sum("stream" in line for line in fake.leaks())

    assert use(20) == use(100)


@pytest.mark.parametrize("end", ["commit", "close", "drop"])
def test_pages_come_back_though_the_owner_destroyed_the_stream(fake: Fake, end) -> None:
    cache = device_cache()
    device, sequence = ascend.open_device(0), cache.sequence()
    owner = ascend.Stream(device)
    handle = owner.handle
    batch = cache.batch([sequence], 5, stream=handle)
    write(cache, batch, 0)
    if end != "drop":
        getattr(batch, end)()
    owner.synchronize()
    del owner
    gc.collect()
    assert not any(f"{handle:#x}" in line for line in fake.leaks())
    del batch
    sequence.free()
    settle(cache)
    assert empty_pool(cache)
    # Whose end was marked in time is not asked for again; else the runtime says that the stream is gone.
    assert bool(fake.misuse()) == (end == "drop")
    fake.clear()
    for seed in range(9):  # as many other streams as are remembered
        append(cache, [cache.sequence()], 1, seed, stream=ascend.Stream(device))
    settle(cache)
    gc.collect()
    device.collect()
    assert fake.misuse() == []


def test_who_follows_a_batch_whose_stream_was_destroyed_is_not_refused(fake: Fake) -> None:
    cache = device_cache()
    device, sequence = ascend.open_device(0), cache.sequence()
    append(cache, [sequence], 5, 0)
    owner, other = ascend.Stream(device), ascend.Stream(device)
    reader = cache.batch([sequence], 0, num_queries=1, stream=owner.handle)
    cache.attend(0, rows(7, 1, HEADS), reader)
    owner.synchronize()
    del owner
    gc.collect()
    append(cache, [sequence], 1, 0, stream=other)
    reader.close()
    settle(cache)
    assert cache.stats()["deferred_pages"] == 0
    assert all("is not a stream" in line for line in fake.misuse())
    fake.clear()
